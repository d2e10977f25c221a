"""Names of devices, virtual devices, and what is said where a device is not there."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from strategies import mirrored, one_device

import replicax as rx

FULL = "/job:localhost/replica:0/task:0/device:"


def names(devices=None):
    return [name.removeprefix(FULL) for name in rx.MirroredStrategy(devices).extended.worker_devices]


def test_the_devices_of_this_suite():
    assert rx.config.list_devices() == [*(f"GPU:{i}" for i in range(8)), *(f"CPU:{i}" for i in range(4))]
    assert len(jax.devices()) == 12


def test_without_an_argument_all_accelerators_are_taken():
    """Fact 113."""
    assert names() == names(None) == names([]) == [f"GPU:{i}" for i in range(8)]


@pytest.mark.parametrize(
    "given, expected",
    [
        (["CPU:1"], ["CPU:1"]),
        (("gpu:0", "/gpu:1"), ["GPU:0", "GPU:1"]),
        (["/device:CPU:0", "/device:cpu:3"], ["CPU:0", "CPU:3"]),
        ([FULL + "GPU:0", FULL + "GPU:1"], ["GPU:0", "GPU:1"]),
        (["GPU:3", "GPU:1", "CPU:0"], ["GPU:3", "GPU:1", "CPU:0"]),
        (["GPU", "CPU"], ["GPU:0", "CPU:0"]),
    ],
    ids=str,
)
def test_names(given, expected):
    """Fact 113."""
    assert names(given) == expected


def test_jax_devices():
    """Fact 113."""
    assert names(jax.devices()[:2]) == ["GPU:0", "GPU:1"]
    assert rx.OneDeviceStrategy(jax.devices()[9]).extended.worker_devices == (FULL + "CPU:1",)


@pytest.mark.parametrize("name", ["nonsense", "", "GPU:", "GPU:x", "GPU:-1", "/GPU:0/1", "a b:0"])
def test_names_that_do_not_parse(name):
    """Facts 113, 117."""
    for make in (lambda: rx.MirroredStrategy([name]), lambda: rx.OneDeviceStrategy(name)):
        with pytest.raises(
            ValueError, match=f"Unknown attribute {name!r} is encountered while parsing the device spec"
        ):
            make()


def test_wrong_kinds_of_devices_are_refused():
    """Facts 113, 117."""
    for wrong in (0, None, ["CPU:0"], 1.5):
        with pytest.raises((rx.DeviceError, TypeError)):
            rx.OneDeviceStrategy(wrong)
        with pytest.raises((rx.DeviceError, TypeError, AttributeError)):
            rx.MirroredStrategy([wrong])
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'device'"):
        rx.OneDeviceStrategy()
    with pytest.raises(rx.DeviceError, match=r"the string 'GPU:0'. For one device write \['GPU:0'\]"):
        rx.MirroredStrategy("GPU:0")
    with pytest.raises(rx.DeviceError, match="is a list of devices; got 2. For so many write"):
        rx.MirroredStrategy(2)


@pytest.mark.parametrize(
    "devices", [["GPU:0", "GPU:0"], ["GPU:0", "/device:gpu:0"], ["CPU:1", "CPU:0", "CPU:1"]], ids=str
)
def test_a_device_named_twice(devices):
    """Fact 113."""
    with pytest.raises(AssertionError, match=r"No duplicates allowed in `devices` argument: \("):
        rx.MirroredStrategy(devices)


@pytest.mark.parametrize("name", ["GPU:8", "CPU:4", "TPU:0", "GPU:100"])
def test_a_device_that_is_not_there(name):
    """Facts 114, 117: TensorFlow silently takes another; here it is an error that lists what there is."""
    for make in (lambda: rx.MirroredStrategy(["GPU:0", name]), lambda: rx.OneDeviceStrategy(name)):
        with pytest.raises(rx.DeviceError, match=f"There is no device {name}.*GPU:0, .*CPU:3") as caught:
            make()
        kind, index = name.split(":")
        assert f"REPLICAX_VIRTUAL_DEVICES={kind}:{int(index) + 1}" in str(caught.value)
    with pytest.raises(rx.DeviceError, match="REPLICAX_VIRTUAL_DEVICES=TPU:3,GPU:2 in"):
        rx.MirroredStrategy(["GPU:1", "TPU:0", "TPU:2"])


def test_set_too_late():
    before = rx.config.list_devices()
    with pytest.raises(rx.DeviceError, match="need 13 CPU devices, but JAX has started already with 12"):
        rx.config.set_virtual_devices({"GPU": 12})
    with pytest.raises(rx.DeviceError, match="TYPE:COUNT"):
        rx.config.set_virtual_devices({"GPU": 0})
    assert rx.config.list_devices() == before and mirrored(2).num_replicas_in_sync == 2


def show(run_python, code, **env):
    finished = run_python("import replicax as rx\n" + code, env={"REPLICAX_VIRTUAL_DEVICES": None, **env})
    return finished.returncode, finished.stdout.split(), finished.stderr


LIST = "print(*rx.config.list_devices())"


@pytest.mark.parametrize(
    "text, expected",
    [
        ("GPU:2", ["GPU:0", "GPU:1", "CPU:0"]),
        (" GPU:1 , TPU:2,CPU:2 ", ["GPU:0", "TPU:0", "TPU:1", "CPU:0", "CPU:1"]),
        ("cpu:3", ["CPU:0", "CPU:1", "CPU:2"]),
        ("NPU:1", ["NPU:0", "CPU:0"]),
        ("", ["CPU:0"]),
    ],
)
def test_virtual_devices_from_the_environment(run_python, text, expected):
    code, out, err = show(run_python, LIST, REPLICAX_VIRTUAL_DEVICES=text)
    assert (code, out) == (0, expected), err


@pytest.mark.sampled(3, others="thorough")
@pytest.mark.parametrize(
    "text", ["GPU", "GPU:0", "GPU:-1", "GPU:x", "GPU:1;CPU:1", "4", "GPU:1,GPU:2", "GPU:1.5", "GPU:1:2"]
)
def test_a_malformed_environment_variable(run_python, text):
    code, _, err = show(functools.partial(run_python, fresh=True), LIST, REPLICAX_VIRTUAL_DEVICES=text)
    assert code == 1 and "DeviceError" in err and repr(text) in err and "TYPE:COUNT" in err


def test_several_types_each_with_devices_of_their_own(run_python):
    code, out, err = show(
        run_python,
        """
rx.config.set_virtual_devices({"GPU": 2, "TPU": 2, "CPU": 2})
gpus, tpus, cpus = (rx.MirroredStrategy([f"{kind}:{i}" for i in range(2)]) for kind in ("GPU", "TPU", "CPU"))
import jax, jax.numpy as jnp
devices = []
for strategy in (gpus, tpus, cpus):
    x = strategy.run(lambda: rx.get_replica_context().all_reduce("SUM", jnp.ones(2) * 2))
    devices += [part.devices().pop() for part in strategy.run(lambda: jnp.ones(2) * 2).values]
    assert [p.tolist() for p in x.values] == [[4.0, 4.0]] * 2
print(len(set(devices)), len(jax.devices()), rx.MirroredStrategy().num_replicas_in_sync)
""",
    )
    assert (code, out) == (0, ["6", "6", "4"]), err


def test_set_twice_before_jax_starts(run_python):
    code, out, err = show(
        run_python,
        """
rx.config.set_virtual_devices({"GPU": 2})
rx.config.set_virtual_devices({"TPU": 3})
print(*rx.config.list_devices())
rx.config.set_virtual_devices({"GPU": 2, "CPU": 1})  # fewer, after the start: only names change
print(*rx.config.list_devices())
""",
    )
    assert (code, out) == (0, ["TPU:0", "TPU:1", "TPU:2", "CPU:0", "GPU:0", "GPU:1", "CPU:0"]), err


def test_set_after_jax_has_started(run_python):
    code, out, err = show(
        run_python,
        """
import jax
jax.devices()
try:
    rx.config.set_virtual_devices({"GPU": 2})
except rx.DeviceError as error:
    print("already" in str(error) and "started" in str(error) and "REPLICAX_VIRTUAL_DEVICES" in str(error))
print(*rx.config.list_devices())
""",
    )
    assert (code, out) == (0, ["True", "CPU:0"]), err


def test_importing_starts_no_device(run_python):
    code, out, err = show(
        run_python,
        """
import jax
jax.config.update("jax_num_cpu_devices", 3)  # fails where JAX has started
print(*rx.config.list_devices())
""",
    )
    assert (code, out) == (0, ["CPU:0", "CPU:1", "CPU:2"]), err


def test_without_virtual_devices_a_strategy_takes_the_cpu(run_python):
    code, out, err = show(run_python, "print(*rx.MirroredStrategy().extended.worker_devices)")
    assert (code, out) == (0, [FULL + "CPU:0"]), err
    code, _, err = show(run_python, 'rx.MirroredStrategy(["GPU:0", "GPU:1"])')
    assert code == 1 and "There is no device GPU:0. This process has: CPU:0." in err


def test_a_second_start_compiles_nothing(run_python, tmp_path):
    """Small programs are kept as well; the cache may be set after the first compilation, or in the environment."""
    program = """
import collections, sys
import jax, jax.numpy as jnp
import replicax as rx

events = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: events.update([event]))
if "late" in sys.argv:
    jax.jit(lambda x: x + 1)(0)
    rx.config.set_compilation_cache(sys.argv[2])
    for wrong in (3, "", __file__, __file__ + "/folder"):
        try:
            rx.config.set_compilation_cache(wrong)
        except (TypeError, ValueError, NotADirectoryError) as error:
            print(type(error).__name__, jax.config.jax_compilation_cache_dir == sys.argv[2])
strategy = rx.MirroredStrategy(["GPU:0", "GPU:1"])
with strategy.scope():
    v = rx.Variable(jnp.ones(3), aggregation=rx.VariableAggregation.SUM)
step = rx.function(lambda: strategy.run(lambda: v.assign_add(v * 2)))
step(), step()
print(v.numpy().tolist(), events["/jax/compilation_cache/cache_misses"])
"""
    folder = str(tmp_path / "made" / "here")
    first = run_python(
        f"import sys; sys.argv += ['late', {folder!r}]\n" + program, env={"REPLICAX_VIRTUAL_DEVICES": "GPU:2"}
    )
    assert first.returncode == 0, first.stderr
    errors, (numbers, misses) = first.stdout.splitlines()[:-1], first.stdout.splitlines()[-1].rsplit(" ", 1)
    assert errors == ["TypeError True", "ValueError True", "NotADirectoryError True", "NotADirectoryError True"]
    assert numbers == "[25.0, 25.0, 25.0]" and int(misses) > 0
    env = {"REPLICAX_VIRTUAL_DEVICES": "GPU:2", "REPLICAX_COMPILATION_CACHE": folder}
    second = run_python(program, env=env)
    assert (second.returncode, second.stdout) == (0, "[25.0, 25.0, 25.0] 0\n"), second.stderr


def test_a_variable_of_one_device_stays_on_it():
    """Whoever assigns it what lies elsewhere; and in compiled functions, also outside of `run`."""
    with one_device().scope():
        several = [rx.Variable(jnp.full(3, float(i))) for i in range(6)]
    with mirrored(2).scope():
        other = rx.Variable(1.0)
    v = several[0]

    def places():
        return {variable.device.removeprefix(FULL) for variable in several}

    v.assign(jax.device_put(jnp.ones(3), jax.devices()[5]))
    assert places() == {"GPU:1"} and v.value().devices() == {jax.devices()[1]}
    v.assign(np.zeros(3))
    v.assign_add(jnp.ones(3))
    assert places() == {"GPU:1"} and v.numpy().tolist() == [1.0] * 3

    def step(scale):
        for variable in several:
            variable.assign_add(scale() * jnp.ones(3))

    inside = rx.function(lambda: one_device().run(lambda: step(lambda: 1.0)))
    for function in (rx.function(lambda: step(lambda: 1.0)), inside, rx.function(lambda: step(other.value))):
        for _ in range(2):
            function()
            assert places() == {"GPU:1"}
    assert [variable.numpy().tolist() for variable in several] == [[6.0 + max(i, 1)] * 3 for i in range(6)]
