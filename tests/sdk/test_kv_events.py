"""KV events, followed with pyzmq and msgpack alone: the subscriber knows what the cache has, and so what the next prompt finds there."""
import json
import os
import random
import re
import subprocess
import sys
import time
import urllib.request

import msgpack
import zmq

from server import KEY, Server

END = b"\xff" * 8


class Subscriber:
    """The cached prefixes, by hash, as tuples of tokens. Messages are lost at random, as from a subscriber that is too slow."""

    def __init__(self, line, loss=0.0):
        events, replay = re.search(r"KV events on (\S+), replay (\S+)", line).groups()
        self.context = zmq.Context()
        self.context.linger = 0  # a test that fails ends
        self.events = self.context.socket(zmq.SUB)
        self.events.connect(events)
        self.events.subscribe(b"")
        self.replay = self.context.socket(zmq.DEALER)
        self.replay.connect(replay)
        self.replay.rcvtimeo = self.events.rcvtimeo = 120000
        self.next, self.prefixes, self.random, self.loss = 0, {}, random.Random(1), loss
        self.losing = self.gaps = 0
        self.topic = None

    def apply(self, payload):
        time, events, rank = msgpack.unpackb(payload)
        assert time > 1.7e9 and rank == 0
        for event in events:
            if event["type"] == "BlockStored":
                prefix, size = (), event["block_size"]
                if event["parent_block_hash"] is not None:
                    prefix = self.prefixes[event["parent_block_hash"]]
                assert len(event["token_ids"]) == size * len(event["block_hashes"])
                for i, hash in enumerate(event["block_hashes"]):
                    prefix += tuple(event["token_ids"][i * size:(i + 1) * size])
                    assert hash not in self.prefixes
                    self.prefixes[hash] = prefix
                assert event["medium"] == "GPU" and event["lora_id"] is None and event["lora_name"] is None
            elif event["type"] == "BlockRemoved":
                for hash in event["block_hashes"]:
                    del self.prefixes[hash]
            else:
                assert event == {"type": "AllBlocksCleared"}
                self.prefixes.clear()
        self.next += 1

    def take(self, sequence, payload):
        """One message; before it, from the other socket, what went missing."""
        if self.losing or self.random.random() < self.loss:
            self.losing = self.losing - 1 if self.losing else self.random.randrange(20)
            return
        if sequence > self.next:
            self.gaps += 1
            self.catch_up()
        if sequence == self.next:
            self.apply(payload)

    def catch_up(self):
        """All that was published before now, without what is known already."""
        self.replay.send_multipart([b"", self.next.to_bytes(8, "big")])
        while True:
            empty, sequence, payload = self.replay.recv_multipart()
            assert empty == b""
            if sequence == END:
                assert payload == b""
                return
            assert int.from_bytes(sequence, "big") == self.next
            self.apply(payload)

    def listen(self, until):
        while self.next < until:
            if not self.events.poll(2000):  # the last ones were lost
                self.catch_up()
                continue
            self.topic, sequence, payload = self.events.recv_multipart()
            self.take(int.from_bytes(sequence, "big"), payload)
            if int.from_bytes(sequence, "big") + 1 == until and self.next < until:
                self.catch_up()


def test_a_subscriber_that_loses_messages_keeps_the_exact_set():
    program = os.path.join(os.path.dirname(sys.argv[1]), "kv_events_run")
    run = subprocess.Popen([program, "100000"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    subscriber = Subscriber(run.stdout.readline(), loss=0.01)
    run.stdin.write("go\n")
    checks = most = 0
    for line in run.stdout:
        truth = json.loads(line)
        subscriber.listen(truth["next"])
        mine = sorted("".join(map(chr, prefix[::4])) for prefix in subscriber.prefixes.values())
        assert mine == truth["cached"], (truth["next"], set(mine) ^ set(truth["cached"]))
        checks, most = checks + 1, max(most, len(mine))
        run.stdin.write("on\n")
    assert run.wait(120) == 0
    assert checks > 100 and most > 20 and subscriber.gaps > 50 and subscriber.topic == b"kv@here@demo"


def test_it_knows_what_the_next_prompt_finds_in_a_servers_cache():
    config = {"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*"}
    server = Server("--kv-events-config", json.dumps(config), "--block-size", "8", "--num-gpu-blocks-override", "40", "--max-model-len", "256",
                    "--enable-prompt-tokens-details", "--enable-admin-endpoints")
    try:
        follow(server)
    finally:
        server.stop()


def follow(server):
    def ask(path, **body):
        request = urllib.request.Request(server.url + path, json.dumps(body).encode(),
                                         {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"})
        return json.load(urllib.request.urlopen(request)) if path != "/reset_prefix_cache" else urllib.request.urlopen(request).read()

    subscriber = Subscriber(next(note for note in server.notes if "KV events" in note))
    dice = random.Random(3)
    found = total = 0
    openings = [f"Chapter {i}. " + " ".join(dice.choice(["sky", "sea", "tree", "bird"]) for _ in range(30)) for i in range(4)]
    for turn in range(60):
        text = dice.choice(openings)[:dice.randrange(20, 150)]
        tokens = ask("/tokenize", prompt=text)["tokens"]
        subscriber.catch_up()
        cached = set(subscriber.prefixes.values())
        expected = 0
        while expected + 8 < len(tokens) and tuple(tokens[:expected + 8]) in cached:
            expected += 8
        usage = ask("/v1/completions", prompt=tokens, max_tokens=dice.randrange(1, 30), ignore_eos=True)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == expected, (turn, usage, expected)
        found, total = found + expected, total + len(tokens)
        if turn == 30:
            ask("/reset_prefix_cache")  # which is done before the next step, and may be answered earlier
            deadline = time.monotonic() + 120
            while subscriber.prefixes and time.monotonic() < deadline:
                subscriber.catch_up()
            assert not subscriber.prefixes
    assert 0.1 < found / total < 0.95


if __name__ == "__main__":
    test_a_subscriber_that_loses_messages_keeps_the_exact_set()
    print("passed: 100,000 random events")
    test_it_knows_what_the_next_prompt_finds_in_a_servers_cache()
    print("passed: a server")
