"""A real redis-server of one's own on a free port, for tests and scripts: started, killed, paused, started again.

It keeps nothing on disk, so a server that is started again is empty. Owner: whoever enters the `with` block,
from one thread.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote

HOST = "127.0.0.1"
START_LIMIT_S = 20.0
STOP_LIMIT_S = 10.0
_POLL_S = 0.01
_PORT_TRIES = 5


class RedisServer:
    """A redis-server on the loopback interface; with `unix` on a socket file as well, with `tls` on TLS alone.

    Args:
        folder: of its own, for its configuration, log, socket and certificates.
        password: asked of the default user.
        config: further lines of its configuration, such as `maxmemory 64mb`.
        sentinel: run it as a sentinel.

    Raises RuntimeError without a redis-server, and with the end of its log when it does not start.
    """

    def __init__(
        self,
        folder: Path,
        *,
        unix: bool = False,
        password: str | None = None,
        tls: bool = False,
        config: Sequence[str] = (),
        sentinel: bool = False,
    ) -> None:
        program = shutil.which("redis-server")
        if program is None:
            raise RuntimeError("no redis-server on the PATH: apt-get install redis-server")
        self._command = [program, str(folder / "redis.conf"), *(["--sentinel"] if sentinel else [])]
        self._folder = folder
        self._password = password
        self._unix = unix
        self._tls = tls
        self._config = tuple(config)
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._tls:
            make_certificates(self._folder)
        for tries_left in reversed(range(_PORT_TRIES)):
            self._port = free_port()
            try:
                self.start()
                break
            except RuntimeError:
                # Another process may have taken the port since we looked.
                if not tries_left or "already in use" not in self._log():
                    raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def port(self) -> int:
        return self._port

    @property
    def url(self) -> str:
        """`redis://` or `rediss://`, with the password and the CA, of database 0."""
        if self._tls:
            return f"rediss://{self._user()}{HOST}:{self._port}/0?ca={quote(str(self.ca_path))}"
        return f"redis://{self._user()}{HOST}:{self._port}/0"

    @property
    def unix_path(self) -> Path:
        """The socket file."""
        return self._folder / "s"

    @property
    def unix_url(self) -> str:
        """`unix://`, with the password, of database 0."""
        return f"unix://{self._user()}{quote(str(self.unix_path))}?db=0"

    @property
    def ca_path(self) -> Path:
        """The certificate that signed the server's own."""
        return self._folder / "ca.pem"

    @property
    def pid(self) -> int:
        return self._running().pid

    def start(self) -> None:
        """Start it, empty, on the port that it had before; returns when it answers."""
        if self._process is not None:
            raise RuntimeError(f"redis-server {self._process.pid} runs already: stop or kill it first")
        (self._folder / "redis.conf").write_text("\n".join([*self._settings(), *self._config, ""]))
        for state in ("nodes.conf", "dump.rdb"):
            (self._folder / state).unlink(missing_ok=True)
        with open(self._folder / "log", "wb") as log:
            self._process = subprocess.Popen(self._command, cwd=self._folder, stdout=log, stderr=log)
        deadline = time.monotonic() + START_LIMIT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"redis-server did not start on port {self._port}: {self._log()[-800:]}")
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """End it in good order; does nothing when it does not run."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGCONT)
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_LIMIT_S)
        self.kill()

    def kill(self) -> None:
        """End it at once, as a crash would; returns when it is gone."""
        process = self._running()
        process.kill()
        process.wait()
        self._process = None

    def pause(self) -> None:
        """Let it take connections and bytes, and answer nothing; returns when it has stopped."""
        self._running().send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        self._running().send_signal(signal.SIGCONT)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("redis-server does not run: start it first")
        return self._process

    def _user(self) -> str:
        return "" if self._password is None else f":{quote(self._password, safe='')}@"

    def _settings(self) -> list[str]:
        lines = [f"bind {HOST}", f'dir "{self._folder}"', f"port {0 if self._tls else self._port}"]
        if "--sentinel" not in self._command:
            lines += ['save ""', "appendonly no"]
        if self._unix:
            lines.append(f'unixsocket "{self.unix_path}"')
        if self._password is not None:
            lines.append(f'requirepass "{self._password}"')
        if self._tls:
            lines += [
                f"tls-port {self._port}",
                f'tls-cert-file "{self._folder}/server.pem"',
                f'tls-key-file "{self._folder}/server.key"',
                f'tls-ca-cert-file "{self.ca_path}"',
                "tls-auth-clients no",
            ]
        return lines

    def _answers(self) -> bool:
        """Does it speak, be it to refuse us?"""
        try:
            with socket.create_connection((HOST, self._port), START_LIMIT_S) as plain:
                if not self._tls:
                    return _ping(plain)
                context = ssl.create_default_context(cafile=str(self.ca_path))
                with context.wrap_socket(plain, server_hostname=HOST) as wrapped:
                    return _ping(wrapped)
        except OSError:
            return False

    def _log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _ping(connection: socket.socket) -> bool:
    connection.sendall(b"PING\r\n")
    answer = connection.recv(64)
    return answer.startswith((b"+PONG", b"-NOAUTH"))


def make_certificates(folder: Path) -> None:
    """Write `ca.pem`, and `server.pem` with `server.key` that it signed for the loopback address, valid for a day."""
    # Imported here: only TLS needs the package.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    def certificate(subject: str, public: ec.EllipticCurvePublicKey, *, is_ca: bool) -> x509.Certificate:
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, subject)]))
            .issuer_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test CA")]))
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        )
        if not is_ca:
            addresses = [x509.DNSName("localhost"), x509.IPAddress(IPv4Address(HOST))]
            builder = builder.add_extension(x509.SubjectAlternativeName(addresses), critical=False)
        return builder.sign(ca_key, hashes.SHA256())

    ca_key, server_key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    pem = serialization.Encoding.PEM
    ca = certificate("test CA", ca_key.public_key(), is_ca=True)
    (folder / "ca.pem").write_bytes(ca.public_bytes(pem))
    (folder / "server.pem").write_bytes(certificate("server", server_key.public_key(), is_ca=False).public_bytes(pem))
    (folder / "server.key").write_bytes(
        server_key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
