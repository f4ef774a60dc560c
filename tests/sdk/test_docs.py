"""Every curl line of docs/server.md, run as it stands but for the port and the key, has a status of 200."""
import pathlib
import re
import subprocess
import sys

from server import KEY, run

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs/server.md"


def curl_lines():
    text = DOCS.read_text().replace("\\\n", " ")
    return [line.strip() for line in text.splitlines() if line.startswith("curl ")]


def test_every_line(server):
    lines = curl_lines()
    assert len(lines) > 15, lines
    for line in lines:
        line = line.replace("localhost:8000", server.url.removeprefix("http://"))
        line = line.replace("curl ", f"curl -sS -o /dev/null -w '%{{http_code}}' -H 'Authorization: Bearer {KEY}' ", 1)
        done = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=120)
        assert done.stdout == "200", (line, done.stdout, done.stderr)


def test_every_endpoint_has_a_line(server):
    import json
    import urllib.request
    request = urllib.request.Request(server.url + "/openapi.json", headers={"Authorization": f"Bearer {KEY}"})
    paths = json.load(urllib.request.urlopen(request))["paths"]
    shown = "\n".join(curl_lines())
    missing = [path for path in paths if not re.search(re.escape(path.replace("{id}", "")) + r"(?![a-z_/])|" + re.escape(path.replace("{id}", "demo")), shown)]
    assert not missing, missing


if __name__ == "__main__":
    if subprocess.run(["curl", "--version"], capture_output=True).returncode != 0:
        print("skipped: there is no curl")
        sys.exit(77)
    run(dict(globals()), "--enable-admin-endpoints", "--enable-tokenizer-info-endpoint")
