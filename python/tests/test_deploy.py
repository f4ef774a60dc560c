"""deploy/kubernetes against the schemas of Kubernetes, and against the program."""

import subprocess

import pytest
from conftest import PROGRAM, SOURCE

yaml = pytest.importorskip("yaml")
validate = pytest.importorskip("kubernetes_validate")

MANIFESTS = list(yaml.safe_load_all((SOURCE / "deploy/kubernetes/nanovllm.yaml").read_text()))


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda manifest: manifest["kind"])
@pytest.mark.parametrize("version", ["1.30", "1.37"])
def test_each_manifest_is_what_kubernetes_takes(manifest, version):
    validate.validate(manifest, version, strict=True)


def test_the_program_has_the_options_and_the_probes_are_its_endpoints():
    container = MANIFESTS[0]["spec"]["template"]["spec"]["containers"][0]
    usage = subprocess.run([PROGRAM, "serve", "--help"], capture_output=True, text=True).stdout
    for argument in container["args"]:
        assert not argument.startswith("--") or argument in usage
    source = "".join(file.read_text() for file in (SOURCE / "src/server").rglob("*.cpp"))
    for probe in ("livenessProbe", "readinessProbe"):
        assert f'"{container[probe]["httpGet"]["path"]}"' in source
    metric = MANIFESTS[2]["spec"]["metrics"][0]["pods"]["metric"]["name"]
    assert metric.replace("_", ":", 1) in source


def test_service_scaler_and_pool_name_the_deployments_pods():
    deployment, service, scaler = MANIFESTS
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    pool = yaml.safe_load((SOURCE / "deploy/kubernetes/inference-pool.yaml").read_text())["spec"]
    for selector in (
        deployment["spec"]["selector"]["matchLabels"],
        service["spec"]["selector"],
        pool["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
    assert labels["llm-d.ai/engine-type"] == "vllm"
    port = deployment["spec"]["template"]["spec"]["containers"][0]["ports"][0]["containerPort"]
    assert [{"number": port}] == pool["targetPorts"]
    assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
