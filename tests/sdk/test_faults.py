"""What happens to the program itself: no descriptors left, clients killed, a rank that hangs under load."""
import http.client
import json
import os
import pathlib
import resource
import signal
import socket
import subprocess
import sys
import time

from server import KEY, QUESTION, Server

ENDLESS = "--max-model-len", "65536", "--allow-long-max-model-len", "--cpu-kvcache-bytes", "1G"  # answers take minutes on any machine
HEADERS = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
SERVED = b"HTTP/1.1 200 "


def address(server):
    host, port = server.url.removeprefix("http://").split(":")
    return host, int(port)


def ask(server, timeout=120):
    connection = http.client.HTTPConnection(*address(server), timeout=timeout)
    connection.request("POST", "/v1/chat/completions", json.dumps({"messages": [{"role": "user", "content": QUESTION}], "temperature": 0}), HEADERS)
    answer = connection.getresponse()
    assert answer.status == 200 and "82" in answer.read().decode()


def open_stream(server):
    """A stream that lasts as long as the context, from its first bytes on."""
    body = json.dumps({"messages": [{"role": "user", "content": "Tell me a story."}], "ignore_eos": True, "stream": True})
    client = socket.create_connection(address(server), timeout=120)
    client.sendall(f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
                   f"Content-Length: {len(body)}\r\n\r\n{body}".encode())
    assert client.recv(1000).startswith(SERVED)
    return client


def rest_of(client):
    text = b""
    while data := client.recv(65536):
        text += data
        if b"0\r\n\r\n" in text[-20:]:
            break
    return text.decode(errors="replace")


def wait_for(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.05)


def load_of(server):
    connection = http.client.HTTPConnection(*address(server), timeout=120)
    connection.request("GET", "/load", headers=HEADERS)
    return json.load(connection.getresponse())["server_load"]


def no_descriptors_left():
    """Clients that find no descriptor wait in the system's queue until others leave; nobody crashes."""
    server = Server("--timeout-keep-alive", "300", preexec=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)))
    clients = [socket.create_connection(address(server), timeout=120) for _ in range(120)]
    for client in clients:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    served = []
    for client in clients:
        client.settimeout(0 if len(served) >= 20 and client is not clients[0] else 120)
        try:
            served.append(client if client.recv(100).startswith(SERVED) else None)
        except BlockingIOError:
            break
    assert 20 <= len(served) < 64 and None not in served, served
    for client in clients[:len(served)]:  # who has a connection is served on
        client.settimeout(120)
        client.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        wait_for(lambda: SERVED in client.recv(1000))
        client.close()
    for client in clients[len(served):]:
        client.settimeout(120)
        assert client.recv(100).startswith(SERVED)
        client.close()
    ask(server)
    server.stop()


def clients_killed():
    """kill -9 of a process with many streams ends all of them."""
    server = Server(*ENDLESS)
    program = ("import sys; sys.argv = ['', *{args}]; sys.path.insert(0, {folder!r}); import test_faults, types, time\n"
               "server = types.SimpleNamespace(url={url!r}); streams = [test_faults.open_stream(server) for _ in range(20)]\n"
               "print('open', flush=True); time.sleep(600)").format(args=sys.argv[1:3], folder=str(pathlib.Path(__file__).parent), url=server.url)
    client = subprocess.Popen([sys.executable, "-B", "-c", program], stdout=subprocess.PIPE, text=True)
    assert client.stdout.readline() == "open\n"
    assert load_of(server) == 20
    client.kill()
    wait_for(lambda: load_of(server) == 0)
    ask(server)
    server.stop()


def status_of(server, path):
    connection = http.client.HTTPConnection(*address(server), timeout=120)
    connection.request("GET", path)
    return connection.getresponse().status


def hanging_server(*arguments):
    """One of whose threads hangs within a step after SIGUSR1. Steps of one thread begin no parallel region."""
    return Server(*ENDLESS, "--threads", "4", *arguments, environment={"LD_PRELOAD": sys.argv[3]})


def a_rank_that_hangs(stays=False):
    """Each stream gets its error, and the program ends with 5."""
    server = hanging_server("--tensor-parallel-size", "2", *["--keep-alive-on-engine-death"] * stays)
    try:
        streams = [open_stream(server) for _ in range(8)]
        assert status_of(server, "/health") == 200
        server.process.send_signal(signal.SIGUSR1)
        for stream in streams:
            text = rest_of(stream)
            assert '"error"' in text and '"code":500' in text and "data: [DONE]" in text, text[-500:]
            assert "rank" in text, text[-500:]
        if stays:
            assert (status_of(server, "/health"), status_of(server, "/livez")) == (503, 500)
            server.process.terminate()
        _, rest = server.process.communicate(timeout=120)
        assert server.process.returncode == 5, (server.process.returncode, rest)
    finally:
        server.process.kill()  # where it has not ended by itself


def a_server_that_outlives_a_rank():
    a_rank_that_hangs(stays=True)


def an_engine_that_hangs():
    """The server says so, and ends all the same."""
    server = hanging_server("--watchdog-timeout", "2", "--shutdown-timeout", "1")
    try:
        stream = open_stream(server)
        server.process.send_signal(signal.SIGUSR1)
        while status_of(server, "/health") != 503:
            time.sleep(0.1)
        server.process.terminate()
        _, rest = server.process.communicate(timeout=120)
        assert server.process.returncode == 5 and "no step for 2 s" in rest, (server.process.returncode, rest)
        stream.close()
    finally:
        server.process.kill()


if __name__ == "__main__":
    for test in no_descriptors_left, clients_killed, a_rank_that_hangs, a_server_that_outlives_a_rank, an_engine_that_hangs:
        test()
        print("passed:", test.__name__, flush=True)
