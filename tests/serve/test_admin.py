"""Routes for the operator: pause, prefix cache, weights."""

from __future__ import annotations

import concurrent.futures
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file
from server_rig import NAME, USER, ServerRig, random_model, serving

from cb_engine.engine import Engine

ADMIN = {"authorization": "Bearer secret"}
CHAT: dict[str, Any] = {"model": NAME, "messages": USER, "temperature": 0, "max_tokens": 8}


def admin(rig: ServerRig, path: str, body: Any = None) -> httpx.Response:
    return rig.post(path, body, headers=ADMIN)


def said(rig: ServerRig) -> str:
    text: str = rig.post("/v1/chat/completions", CHAT).json()["choices"][0]["message"]["content"]
    return text


def test_a_paused_engine_lets_requests_wait():
    with serving(admin_key="secret") as rig, concurrent.futures.ThreadPoolExecutor() as pool:
        before = said(rig)
        assert admin(rig, "/pause").json() == {"paused": True}
        assert admin(rig, "/pause").json() == {"paused": True}, "a second one changes nothing"
        asked = pool.submit(said, rig)
        rig.wait_until(lambda: rig.context.under_way)
        steps = rig.stats().num_steps
        assert rig.get("/health").json()["paused"]
        assert rig.stats().num_waiting == 1, "also before any step has seen it"
        assert admin(rig, "/reset_prefix_cache").status_code == 200
        assert rig.stats().num_steps == steps
        assert admin(rig, "/resume").json() == {"paused": False}
        assert asked.result(20) == before
        assert admin(rig, "/resume").json() == {"paused": False}


def test_a_paused_server_ends():
    with serving(admin_key="secret") as rig:
        admin(rig, "/pause")


def test_the_prefix_cache_is_forgotten():
    with serving(admin_key="secret") as rig:

        def cached() -> int:
            count: int = rig.post("/v1/chat/completions", CHAT).json()["usage"]["prompt_tokens_details"][
                "cached_tokens"
            ]
            return count

        assert (cached(), cached() > 0) == (0, True)
        admin(rig, "/reset_prefix_cache")
        assert cached() == 0


def test_new_weights_are_taken_over(tmp_path: Path):
    model, other = random_model(), _other()
    save_file(other, tmp_path / "step1.safetensors")
    with serving(model, admin_key="secret", weights_dir=str(tmp_path)) as rig:
        before = said(rig)
        info = rig.get("/weight_info", headers=ADMIN).json()
        assert info["weight_version"] == 0
        assert info["parameters"]["lm_head.weight"] == {"shape": [259, 32], "dtype": "float32"}
        answer = admin(rig, "/update_weights", {"path": "step1.safetensors"})
        assert (answer.status_code, answer.json()) == (200, {"weight_version": 1})
        after = said(rig)
        assert after != before
        assert torch.equal(model.lm_head.weight, other["lm_head.weight"])
        (tmp_path / "folder").mkdir()
        save_file(other, tmp_path / "folder" / "model.safetensors")
        assert admin(rig, "/update_weights", {"path": "folder"}).status_code == 200
        assert said(rig) == after
        with serving(_loaded(other)) as fresh:
            assert said(fresh) == after


def test_weights_may_be_updated_in_a_pause(tmp_path: Path):
    save_file(_other(), tmp_path / "step.safetensors")
    with serving(admin_key="secret", weights_dir=str(tmp_path)) as rig, concurrent.futures.ThreadPoolExecutor() as pool:
        before = said(rig)
        admin(rig, "/pause")
        asked = pool.submit(said, rig)
        rig.wait_until(lambda: rig.context.under_way)
        assert admin(rig, "/update_weights", {"path": "step.safetensors"}).json() == {"weight_version": 1}
        assert rig.get("/weight_info", headers=ADMIN).json()["weight_version"] == 1
        assert admin(rig, "/update_weights", {"path": "nope"}).status_code == 400
        admin(rig, "/resume")
        assert asked.result(20) != before


def _other() -> dict[str, torch.Tensor]:
    import tiny

    model = tiny.make_model("llama", seed=5, vocab_size=259, max_position_embeddings=512)
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _loaded(tensors: dict[str, torch.Tensor]) -> Any:
    model = random_model()
    model.load_state_dict(tensors)
    return model


def test_health_answers_while_weights_are_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In a pause or not, and with requests and a /resume coming in meanwhile."""
    save_file(_other(), tmp_path / "step.safetensors")
    begun, release = threading.Event(), threading.Event()
    update = Engine.update_weights

    def slowly(self: Engine, tensors: Any) -> None:
        begun.set()
        assert release.wait(30)
        update(self, tensors)

    monkeypatch.setattr(Engine, "update_weights", slowly)
    for paused in (True, False):
        begun.clear()
        release.clear()
        with (
            serving(admin_key="secret", weights_dir=str(tmp_path)) as rig,
            concurrent.futures.ThreadPoolExecutor() as pool,
        ):
            if paused:
                admin(rig, "/pause")
            updated = pool.submit(admin, rig, "/update_weights", {"path": "step.safetensors"})
            assert begun.wait(20)
            asked = pool.submit(said, rig)
            rig.wait_until(lambda r=rig: r.context.under_way)
            assert rig.get("/health").status_code == 200
            assert admin(rig, "/resume").status_code == 200
            assert rig.get("/health").status_code == 200
            release.set()
            assert updated.result(20).json() == {"weight_version": 1}
            assert asked.result(20)


def test_a_pause_of_an_engine_that_has_ended_is_refused(monkeypatch: pytest.MonkeyPatch):
    def ended(self: Any) -> Any:
        raise RuntimeError("pause() needs a running manager")

    with serving(admin_key="secret") as rig:
        monkeypatch.setattr("cb_engine.api.manager.ContinuousBatchingManager.pause", ended)
        assert admin(rig, "/pause").status_code == 503
        assert not rig.context.host.pause.is_on
        assert admin(rig, "/reset_prefix_cache").status_code == 200


def test_only_safetensors_below_the_folder_are_read(tmp_path: Path):
    inside, outside = tmp_path / "weights", tmp_path / "outside.safetensors"
    inside.mkdir()
    save_file({"x": torch.zeros(1)}, outside)
    (inside / "link.safetensors").symlink_to(outside)
    (inside / "folder").mkdir()
    (inside / "folder" / "link.safetensors").symlink_to(outside)
    (inside / "bad.safetensors").write_bytes(b"\x80\x04 no safetensors")
    save_file({"unknown.weight": torch.zeros(1)}, inside / "unknown.safetensors")
    save_file({"lm_head.weight": torch.zeros(3)}, inside / "shape.safetensors")
    save_file({"lm_head.weight": torch.zeros(259, 32, dtype=torch.int32)}, inside / "kind.safetensors")
    with serving(admin_key="secret", weights_dir=str(inside)) as rig:
        before = said(rig)
        for path, message in [
            ("../outside.safetensors", "leads out"),
            (str(outside), "leads out"),
            ("link.safetensors", "leads out"),
            ("folder", "leads out"),
            ("missing", "holds no safetensors"),
            ("", "no safetensors file"),
            ("bad.safetensors", "no safetensors file"),
            ("unknown.safetensors", "no parameter 'unknown.weight'"),
            ("shape.safetensors", "has shape"),
            ("kind.safetensors", "the update torch.int32"),
            ("x" * 5000, "is no path"),
            ("a\x00b", "is no path"),
        ]:
            answer = admin(rig, "/update_weights", {"path": path})
            assert answer.status_code == 400, path
            error = answer.json()["error"]["message"]
            assert message in error or "leads out" in error, path
            assert str(tmp_path) not in error or path == str(outside)
        assert said(rig) == before
    with serving(admin_key="secret") as rig:
        answer = admin(rig, "/update_weights", {"path": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "no_weights_dir")


@pytest.mark.parametrize("path", ["/pause", "/reset_prefix_cache"])
def test_a_draining_server_takes_no_admin_either(path: str):
    with serving(admin_key="secret") as rig:
        rig.context.host.begin_drain()
        assert admin(rig, path).status_code == 503
