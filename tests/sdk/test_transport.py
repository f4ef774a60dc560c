"""HTTPS with a certificate of the test's own, and a Unix socket."""
import http.client
import json
import pathlib
import re
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile

from server import KEY, QUESTION, Server

BODY = json.dumps({"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "stream": True})


def ask(connection):
    """A stream over `connection`, and another request on the same one."""
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", BODY, headers)
    answer = connection.getresponse()
    assert answer.status == 200
    events = [json.loads(data) for data in re.findall(r"^data: (\{.*)$", answer.read().decode(), re.M)]
    text = "".join(choice["delta"].get("content", "") for event in events for choice in event["choices"])
    assert "82" in text, events
    connection.request("GET", "/v1/models", headers=headers)
    assert connection.getresponse().status == 200


def over_tls(directory):
    certificate, key = directory / "certificate.pem", directory / "key.pem"
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj",
                    "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", key, "-out", certificate],
                   check=True, capture_output=True)
    server = Server("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key))
    host, port = server.url.removeprefix("https://").split(":")
    ask(http.client.HTTPSConnection(host, int(port), context=ssl.create_default_context(cafile=certificate), timeout=120))
    # HTTP/1.0, as nginx asks by default: the connection's end is the stream's, and must not look like a cut (RFC 8446, 6.1)
    with ssl.create_default_context(cafile=certificate).wrap_socket(
            socket.create_connection((host, int(port)), 120), server_hostname=host, suppress_ragged_eofs=False) as old:
        old.sendall(f"POST /v1/chat/completions HTTP/1.0\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
                    f"Content-Length: {len(BODY)}\r\n\r\n{BODY}".encode())
        assert b"".join(iter(lambda: old.recv(65536), b"")).endswith(b"data: [DONE]\n\n")
    with socket.create_connection((host, int(port))) as plain:  # no TLS: the server hangs up and serves on
        plain.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        plain.settimeout(120)
        assert not plain.recv(100).startswith(b"HTTP/1.1 200")
    ask(http.client.HTTPSConnection(host, int(port), context=ssl.create_default_context(cafile=certificate), timeout=120))
    server.stop()


class UnixConnection(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(120)
        self.sock.connect(self.host)


def over_a_unix_socket(directory):
    path = directory / "socket"
    with socket.socket(socket.AF_UNIX) as left_over:  # as a process that was killed leaves it
        left_over.bind(str(path))
    server = Server("--uds", str(path))
    ask(UnixConnection(str(path)))
    server.stop()
    assert not path.exists()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        over_a_unix_socket(pathlib.Path(name))
        print("passed: Unix socket")
        if not shutil.which("openssl"):
            print("skipped: TLS, there is no openssl")
            sys.exit(77)
        over_tls(pathlib.Path(name))
        print("passed: TLS")
