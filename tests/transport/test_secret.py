"""The secret of a job: where it comes from, and who can read it."""

from __future__ import annotations

import os
import stat
import textwrap
import warnings

import pytest

from replicax import JobError
from replicax._transport import secret
from replicax._transport.secret import identity, job_secret

HERE, THERE = ["127.0.0.1:1", "localhost:2", "[::1]:3"], ["127.0.0.1:1", "10.0.0.1:2"]


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    for name in (secret.SECRET, secret.SECRET_FILE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_the_secret_and_the_file_of_the_environment(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("the secret of the file\n")
    (tmp_path / "file").chmod(0o600)
    monkeypatch.setenv(secret.SECRET_FILE, str(tmp_path / "file"))
    assert job_secret(THERE) == b"the secret of the file"
    monkeypatch.setenv(secret.SECRET, "of the environment")
    assert job_secret(THERE) == b"of the environment"


@pytest.mark.parametrize("mode", ["0644", "0640", "0604", "0660", "0600", "0400"])
def test_a_secret_file_that_other_users_can_open_is_warned_of(monkeypatch, tmp_path, mode):
    path = tmp_path / "the file"
    path.write_text("the secret of the file")
    path.chmod(int(mode, 8))
    monkeypatch.setenv(secret.SECRET_FILE, str(path))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert job_secret(THERE) == b"the secret of the file"
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == (mode not in ("0600", "0400"))
    assert all(f"(mode {mode})" in text and f"`chmod 600 '{path}'`" in text for text in texts)


def test_none_turns_it_off_with_a_warning_each_time(monkeypatch):
    monkeypatch.setenv(secret.SECRET, "none")
    for _ in range(2):
        with pytest.warns(UserWarning, match="neither authenticate each other nor encrypt"):
            assert job_secret(THERE) is None


def test_an_address_beyond_this_machine_needs_a_secret(monkeypatch, tmp_path):
    with pytest.raises(JobError, match=r"(?s)'10.0.0.1:2', need a secret. Make one with .*REPLICAX_JOB_SECRET_FILE"):
        job_secret(THERE)
    for name, says in (("missing", "cannot be read"), ("empty", "is empty")):
        (tmp_path / "empty").touch()
        monkeypatch.setenv(secret.SECRET_FILE, str(tmp_path / name))
        with pytest.raises(JobError, match=says):
            job_secret(THERE)


@pytest.mark.parametrize("name", [secret.SECRET, secret.SECRET_FILE])
def test_a_secret_that_can_be_guessed_is_refused(name, monkeypatch, tmp_path):
    def give(text):
        path = tmp_path / "file"
        path.write_text(text)
        path.chmod(0o600)
        monkeypatch.setenv(name, text if name == secret.SECRET else str(path))

    give("x" * 16)
    assert job_secret(THERE) == b"x" * 16
    give("x" * 15)
    with pytest.raises(JobError, match=f"{name}.* has 15 bytes, and can be guessed: it needs at least 16. Make one"):
        job_secret(THERE)


def test_a_secret_of_the_user_is_made_once_and_only_the_user_can_read_it(home):
    found = job_secret(HERE)
    assert found == job_secret(HERE) == job_secret([]) and len(found) == 64
    folder = home / ".replicax"
    assert [path.name for path in folder.iterdir()] == ["job-secret"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "job-secret").stat().st_mode) == 0o600


def test_a_secret_that_others_could_read_is_not_used(home):
    job_secret(HERE)
    path = home / ".replicax" / "job-secret"
    path.chmod(0o640)
    with pytest.raises(JobError, match=r"open to other users \(mode 0640\)"):
        job_secret(HERE)
    path.unlink()
    path.symlink_to(home / "elsewhere")
    (home / "elsewhere").write_text("planted")
    with pytest.raises(OSError):
        job_secret(HERE)


def _no_folder(monkeypatch, home):
    monkeypatch.setenv("HOME", str(home / "no" / "home"))


def _no_home(monkeypatch, home):
    def unknown():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(secret.Path, "home", unknown)


def _open_to_others(monkeypatch, home):
    (home / ".replicax").mkdir()
    (home / ".replicax").chmod(0o755)


def _no_links(monkeypatch, home):
    link = os.link

    def in_temporary_files(made, path):
        if home / ".replicax" in path.parents:
            raise PermissionError(1, "Operation not permitted")
        link(made, path)

    monkeypatch.setattr(os, "link", in_temporary_files)


@pytest.mark.parametrize("prepare", [_no_folder, _no_home, _open_to_others, _no_links])
def test_where_the_home_will_not_do_the_secret_is_among_the_temporary_files(prepare, home, monkeypatch, tmp_path):
    prepare(monkeypatch, home)
    monkeypatch.setattr(secret.tempfile, "tempdir", str(tmp_path))
    path = tmp_path / f"replicax-{os.getuid()}" / "job-secret"
    assert job_secret(HERE) == path.read_bytes() == job_secret(HERE)
    path.parent.chmod(0o755)
    with pytest.raises(JobError, match=rf"no place for a secret of this user: .*{path.parent}.*open to other users"):
        job_secret(HERE)


def test_processes_that_start_at_once_have_one_secret(run_python, home):
    done = run_python(
        textwrap.dedent("""
        import os
        from replicax._transport.secret import job_secret
        go, start = os.pipe()
        found, tell = os.pipe()
        children = []
        for _ in range(20):
            if not (child := os.fork()):
                os.read(go, 1)
                os.write(tell, job_secret(["localhost:1"]))
                os._exit(0)
            children.append(child)
        os.write(start, b"g" * 20)
        for child in children:
            assert os.waitpid(child, 0)[1] == 0
        secrets = os.read(found, 10_000)
        assert len(secrets) == 20 * 64 and secrets == secrets[:64] * 20
        assert os.listdir(os.path.expanduser("~/.replicax")) == ["job-secret"]
        """),
        env={"HOME": str(home)},
    )
    assert done.returncode == 0, done.stderr


def test_the_identity_follows_from_the_secret_alone(run_python):
    assert identity.__wrapped__(b"one") == identity(b"one") != identity(b"two")
    done = run_python("from replicax._transport.secret import identity; print(identity(b'one')[1].decode())")
    assert done.stdout.strip().encode() == identity(b"one")[1].strip()
