"""The secret of a job, and the identity that both sides of a connection derive of it.

Everything that tasks send to each other is encrypted, and only who knows the secret can connect: client and server
derive the same key and, byte for byte, the same certificate from it, and each accepts that certificate alone.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import ipaddress
import os
import secrets
import shlex
import stat
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from replicax._base.doc_pages import install
from replicax._base.errors import JobError
from replicax._job.channel import is_own

SECRET, SECRET_FILE = "REPLICAX_JOB_SECRET", "REPLICAX_JOB_SECRET_FILE"
_SHORTEST = 16  # bytes
HOST_NAME = "replicax-job"  # the name in the certificate, whatever the address

HOW = (
    'Make one with `python -c "import secrets; print(secrets.token_hex())" > job-secret; chmod 600 job-secret`, copy '
    f"the file to each machine, and set {SECRET_FILE} to its path there (or {SECRET} to its content)."
)


def job_secret(addresses: Iterable[str]) -> bytes | None:
    """Returns the secret of the job whose tasks have these addresses; None where `REPLICAX_JOB_SECRET` is "none".

    It is the value of `REPLICAX_JOB_SECRET`, or the content of the file that `REPLICAX_JOB_SECRET_FILE` names. Where
    neither is set and all addresses are loopback addresses, it is a secret of this user, made on first use.

    Raises:
        JobError: there is no secret and an address beyond the loopback, or the secret is short or cannot be read.
    """
    given = os.environ.get(SECRET, "").strip()
    if given.lower() == "none":
        warnings.warn(
            f"{SECRET} is 'none': tasks of this job neither authenticate each other nor encrypt what they send. "
            "Whoever can reach their ports can run code in them.",
            stacklevel=2,
        )
        return None
    if given:
        return _long_enough(given.encode(), f"of {SECRET}")
    if path := os.environ.get(SECRET_FILE, "").strip():
        return _of_file(path)
    if beyond := [address for address in addresses if not is_loopback(address)]:
        raise JobError(f"Tasks at addresses beyond this machine, such as {beyond[0]!r}, need a secret. {HOW}")
    return _of_user()


def is_given() -> bool:
    """Returns whether the user has given a secret, or has turned it off."""
    return any(os.environ.get(name, "").strip() for name in (SECRET, SECRET_FILE))


def refuse_pickles(secret: bytes | None, address: str) -> None:
    """Raises JobError where a task that unpickles what comes would listen to strangers on other machines."""
    if secret is None and not is_loopback(address):
        raise JobError(
            f"A task at {address} would run code for whoever can reach it, since functions and datasets are sent by "
            f"pickle: it needs the job's secret, and {SECRET} is 'none'. {HOW}"
        )


def is_loopback(address: str) -> bool:
    """Returns whether `"host:port"` is an address of the loopback; names other than localhost are not.

    >>> [is_loopback(address) for address in ("localhost:1", "127.0.0.1:1", "[::1]:1", ":0", "10.0.0.1:1", "me:1")]
    [True, True, True, True, False, False]
    """
    host = address.rpartition(":")[0].strip("[]")
    if host in ("", "localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback and is_own(host)
    except ValueError:
        return False


def _of_file(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            secret, mode = file.read().strip(), os.fstat(file.fileno()).st_mode
    except OSError as error:
        raise JobError(f"The file that {SECRET_FILE} names cannot be read: {error}. {HOW}") from error
    if not secret:
        raise JobError(f"The file that {SECRET_FILE} names, {path!r}, is empty. {HOW}")
    if os.name == "posix" and mode & 0o077:  # a warning, since platforms' stores of secrets make files of mode 0644
        warnings.warn(
            f"The file that {SECRET_FILE} names, {path!r}, is open to other users of this machine (mode "
            f"{stat.S_IMODE(mode):04o}), and whoever has the secret can run code in the job. Expected mode 0600: "
            f"`chmod 600 {shlex.quote(path)}`.",
            stacklevel=2,
        )
    return _long_enough(secret, f"in the file that {SECRET_FILE} names, {path!r},")


def _long_enough(secret: bytes, where: str) -> bytes:
    if len(secret) < _SHORTEST:
        raise JobError(
            f"The secret {where} has {len(secret)} bytes, and can be guessed: it needs at least {_SHORTEST}. {HOW}"
        )
    return secret


def _of_user() -> bytes:
    """Returns the secret that programs of this user on this machine share, from the first place that will do."""
    errors = []
    for folder in _places():
        try:
            path = _made(folder)
        except OSError as error:
            errors.append(str(error))
        else:
            return _own_content(path)
    raise JobError(f"There is no place for a secret of this user: {'; '.join(errors)}. {HOW}")


def _places() -> Iterator[Path]:
    """Yields the folder ~/.replicax, if there is a home, and one among the temporary files."""
    with contextlib.suppress(RuntimeError):  # no HOME, and a user whom the system does not know
        yield Path.home() / ".replicax"
    user = os.getuid() if hasattr(os, "getuid") else "user"
    yield Path(tempfile.gettempdir()) / f"replicax-{user}"


def _made(folder: Path) -> Path:
    """Returns the file with the secret in a folder that others cannot enter, and makes both if they are not there.

    Raises:
        OSError: others can enter it, or it cannot be made, or its file system has no hard links.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    if problem := _exposed(folder, os.lstat(folder)):
        raise PermissionError(problem)
    path = folder / "job-secret"
    if os.path.lexists(path):
        return path
    # Made aside and then linked: whoever comes second finds the whole secret of the first.
    handle, made = tempfile.mkstemp(dir=folder)  # of mode 0600
    try:
        with open(handle, "w", encoding="ascii") as file:
            file.write(secrets.token_hex())
            file.flush()
            os.fsync(handle)
        with contextlib.suppress(FileExistsError):
            os.link(made, path)
    finally:
        os.unlink(made)
    return path


def _own_content(path: Path) -> bytes:
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    with open(handle, "rb") as file:
        if problem := _exposed(path, os.fstat(handle)):
            raise JobError(f"{problem}. Delete it; a new one is then made. {HOW}")
        found = file.read().strip()
    if not found:
        raise JobError(f"{path} is empty. Delete it; a new secret is then made.")
    return found


def _exposed(path: Path, found: os.stat_result) -> str:
    """Returns why a secret of this user cannot be there; empty if it can."""
    if not hasattr(os, "getuid"):  # Windows: folders of a user are private by their place
        return ""
    if found.st_uid != os.getuid():
        return f"{path}, which is to have a secret of this user, belongs to another user"
    if (mode := stat.S_IMODE(found.st_mode)) & 0o077:
        return f"{path}, which is to have a secret of this user, is open to other users (mode {mode:04o})"
    return ""


@functools.lru_cache(maxsize=8)
def stretched(secret: bytes) -> bytes:
    """Returns 48 bytes that follow from a secret, which cost much to compute.

    Whoever sees the certificate, or the launcher's digest, can try secrets without asking a task.
    """
    return hashlib.scrypt(secret, salt=b"replicax tls", n=2**14, r=8, p=1, dklen=48)


@functools.lru_cache(maxsize=8)
def identity(secret: bytes) -> tuple[bytes, bytes]:
    """Returns the private key and the certificate that belong to a secret, as PEM.

    Everything in them follows from the secret, the signature too (RFC 6979), so that both sides have equal bytes.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID
    except ImportError as error:
        raise missing("cryptography") from error
    order = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # of the curve P-256
    number = int.from_bytes(stretched(secret), "big")
    key = ec.derive_private_key(number % (order - 1) + 1, ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, HOST_NAME)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(datetime.datetime(2020, 1, 1))
        .not_valid_after(datetime.datetime(2099, 1, 1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(HOST_NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256(), ecdsa_deterministic=True)
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private, certificate.public_bytes(serialization.Encoding.PEM)


def sealed(key: bytes, password: bytes) -> bytes:
    """Returns a private key of `identity` as PEM, encrypted with a password."""
    from cryptography.hazmat.primitives import serialization

    return serialization.load_pem_private_key(key, None).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(password),
    )


def missing(library: str) -> ImportError:
    """Returns the error for a library of the extra `ps` that is not installed."""
    return ImportError(f"Tasks of a cluster call each other with {library}: {install('ps')}", name=library)
