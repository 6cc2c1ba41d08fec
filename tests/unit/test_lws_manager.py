"""The LeaderWorkerSet manager's webhook configurations as they are installed beside a process instead of a Service."""

import base64

import pytest
import yaml

from infra.rehearsal.lws_manager import ManagerPrograms, webhook_configurations


def webhook(name, path, **more):
    service = {"name": "webhook-service", "namespace": "system", "path": path}
    return {"name": name, "clientConfig": {"service": service}, "failurePolicy": "Fail", **more}


@pytest.fixture
def programs(tmp_path):
    """Files of the form that the module has them in: two configurations, and a patch for the pods' webhook of each."""
    documents, files = [], {}
    for kind, patch in (("Mutating", "mutating-patch.yaml"), ("Validating", "validating-patch.yaml")):
        path = f"/{kind.lower()}--v1-pod"
        webhooks = [webhook("groups", f"/{kind.lower()}-groups"), webhook("pods", path)]
        metadata = {"name": f"{kind.lower()}-webhook-configuration"}
        documents.append({"kind": f"{kind}WebhookConfiguration", "metadata": metadata, "webhooks": webhooks})
        value = webhook(
            "pods", path, objectSelector={"matchExpressions": [{"key": "of-a-group", "operator": "Exists"}]}
        )
        files[patch] = tmp_path / patch
        files[patch].write_text(yaml.safe_dump([{"op": "replace", "path": "/webhooks/1", "value": value}]))
    files["manifests.yaml"] = tmp_path / "manifests.yaml"
    files["manifests.yaml"].write_text(yaml.safe_dump_all(documents))
    return ManagerPrograms(tmp_path / "lws-manager", files)


def test_every_webhook_is_reached_by_url_and_our_ca(programs):
    found = {obj["kind"]: obj for obj in webhook_configurations(programs, "https://127.0.0.1:9443", b"PEM")}
    assert set(found) == {"MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"}
    for kind, obj in found.items():
        verb = kind.removesuffix("WebhookConfiguration").lower()
        assert obj["metadata"]["name"] == f"lws-{verb}-webhook-configuration"
        bundle = base64.b64encode(b"PEM").decode()
        assert [hook["clientConfig"] for hook in obj["webhooks"]] == [
            {"url": f"https://127.0.0.1:9443/{verb}-groups", "caBundle": bundle},
            {"url": f"https://127.0.0.1:9443/{verb}--v1-pod", "caBundle": bundle},
        ]
        assert all(hook["failurePolicy"] == "Fail" for hook in obj["webhooks"]), "without it a group has no environment"


def test_pods_of_no_group_are_not_asked_about(programs):
    for obj in webhook_configurations(programs, "https://127.0.0.1:9443", b"PEM"):
        groups, pods = obj["webhooks"]
        assert "objectSelector" not in groups
        assert pods["objectSelector"]["matchExpressions"] == [{"key": "of-a-group", "operator": "Exists"}]


def test_a_patch_of_another_form_is_not_half_applied(programs):
    patch = [{"op": "add", "path": "/webhooks/1/objectSelector", "value": {}}]
    programs.manifests["mutating-patch.yaml"].write_text(yaml.safe_dump(patch))
    with pytest.raises(ValueError, match="the operation add, not replace"):
        list(webhook_configurations(programs, "https://127.0.0.1:9443", b"PEM"))
