"""Training of EAGLE-3 heads, from the target's answers to a head that the engine drafts with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

import train_eagle3
from cb_engine import attach
from cb_engine.models import load_model
from cb_engine.runner.drafters.eagle3_checkpoint import load_eagle3, save_eagle3
from cb_engine.runner.drafters.eagle3_head import Eagle3Head
from cb_engine.runner.probe import PlainAttention
from eagle3.examples import Example, choose_vocabulary, collect_examples, coverage, load_examples, save_examples
from eagle3.generations import Generation, fingerprint, generate_missing
from eagle3.initialising import make_head
from eagle3.training import Recipe, Trainer, pass_losses
from eagle3.unrolling import PaddedBatch, unroll

AUX = (0, 1, 1)
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny.family("llama")[0]


@pytest.fixture(scope="module")
def generations(target: Any) -> list[Generation]:
    prompts = tiny.make_prompts((5, 9, 3, 14, 6, 8), seed=3)
    return [Generation(i, p, tiny.generate(target, p, NEW_TOKENS)) for i, p in enumerate(prompts)]


@pytest.fixture(scope="module")
def vocabulary(generations: list[Generation]) -> torch.Tensor:
    return choose_vocabulary(generations, 40, tiny.VOCAB)


@pytest.fixture(scope="module")
def examples(target: Any, generations: list[Generation], vocabulary: torch.Tensor) -> list[Example]:
    return collect_examples(target, generations, vocabulary, AUX)


@pytest.fixture
def head(target: Any, vocabulary: torch.Tensor) -> Eagle3Head:
    made = make_head(target, vocabulary, seed=0)
    object.__setattr__(made.config, "aux_layer_ids", AUX)
    return made


# ---- generations ---------------------------------------------------------------------------------------------------

SETTINGS = {"model": "tiny", "max_new": 6}


@pytest.fixture
def attached() -> Any:
    return attach(tiny.make_model("llama"))


def test_generations_are_the_models_own_and_kept(
    attached: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = dict(enumerate(tiny.make_prompts((4, 7, 2)), start=10))
    made = generate_missing(attached, prompts, SETTINGS, tmp_path / "g.jsonl")
    assert made == [Generation(q, ids, tiny.generate(attached, ids, 6)) for q, ids in prompts.items()]
    monkeypatch.setattr(attached, "continuous_batching_context_manager", None)  # nothing is left to generate
    assert generate_missing(attached, prompts, SETTINGS, tmp_path / "g.jsonl") == made


def test_generating_goes_on_behind_the_last_whole_line(attached: Any, tmp_path: Path) -> None:
    prompts = dict(enumerate(tiny.make_prompts((4, 7, 2))))
    path = tmp_path / "g.jsonl"
    made = generate_missing(attached, prompts, SETTINGS, path)
    first, *lines = path.read_text().splitlines(keepends=True)
    kept = [line for line in lines if '"question": 2' not in line]
    path.write_text("".join([first, *kept, kept[0][:20]]))
    assert fingerprint(made[:2]) != fingerprint(made)
    assert generate_missing(attached, prompts, SETTINGS, path) == made
    assert len(path.read_text().splitlines()) == 4
    for line in path.read_text().splitlines():
        json.loads(line)


def test_generations_of_something_else_are_not_taken(attached: Any, tmp_path: Path) -> None:
    path = tmp_path / "g.jsonl"
    generate_missing(attached, {0: [1, 2, 3]}, SETTINGS, path)
    with pytest.raises(ValueError, match=r"g.jsonl was made with max_new=6, this run has 7; .* another --output"):
        generate_missing(attached, {0: [1, 2, 3]}, {**SETTINGS, "max_new": 7}, path)
    with pytest.raises(ValueError, match=r"another question 0 than the dataset has; delete it"):
        generate_missing(attached, {0: [1, 2, 4]}, SETTINGS, path)


# ---- examples ------------------------------------------------------------------------------------------------------


def test_the_vocabulary_prefers_frequent_tokens_of_answers() -> None:
    generations = [Generation(0, [7, 7, 7, 5], [9, 3, 9]), Generation(1, [5, 6], [3, 9, 8])]
    chosen = {size: choose_vocabulary(generations, size, 12).tolist() for size in (1, 2, 4, 6, 7, 99)}
    assert chosen[1] == [9]
    assert chosen[2] == [3, 9]
    assert chosen[4] == [3, 7, 8, 9]
    assert chosen[6] == [3, 5, 6, 7, 8, 9]
    assert chosen[7] == [0, 3, 5, 6, 7, 8, 9]
    assert chosen[99] == list(range(12))
    assert coverage(generations, torch.tensor([3, 9])) == pytest.approx(5 / 6)


def test_rows_of_an_example_belong_to_their_tokens(
    target: Any, generations: list[Generation], examples: list[Example], vocabulary: torch.Tensor
) -> None:
    """Row p has the states at p, and teaches what the target expects at p + 1, for every token of the answer."""
    known = vocabulary.tolist()
    for generation, example in zip(generations, examples, strict=True):
        with torch.no_grad():
            out = target(torch.tensor([generation.token_ids]), output_hidden_states=True)
        expected = torch.cat([out.hidden_states[i][0] for i in AUX], -1)
        torch.testing.assert_close(example.aux, expected, rtol=1e-4, atol=1e-4)
        assert example.token_ids.tolist() == generation.token_ids
        first, last = len(generation.prompt_ids) - 1, len(generation.token_ids) - 1
        for p in range(len(generation.token_ids)):
            following = generation.token_ids[p + 1] if first <= p < last else None
            assert bool(example.is_taught[p]) == (following in known)
            if example.is_taught[p]:
                assert known[int(example.teacher_ids[p, 0])] == following
                probs = out.logits[0, p, vocabulary].softmax(-1)[example.teacher_ids[p].long()]
                torch.testing.assert_close(example.teacher_probs[p], probs / probs.sum(), rtol=1e-3, atol=1e-5)
    assert any(not e.is_taught[e.prompt_length - 1 : -1].all() for e in examples), "some tokens cannot be drafted"


def test_examples_are_kept(examples: list[Example], tmp_path: Path) -> None:
    path = tmp_path / "examples.pt"
    save_examples(examples, {"model": "tiny"}, path)
    for kept, example in zip(load_examples({"model": "tiny"}, path), examples, strict=True):
        assert kept.prompt_length == example.prompt_length
        assert torch.equal(kept.aux, example.aux)
        assert torch.equal(kept.teacher_probs, example.teacher_probs)
    with pytest.raises(ValueError, match=r"examples.pt was made with model='tiny', this run has 'other'"):
        load_examples({"model": "other"}, path)


# ---- passes --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def chain_of(head: Eagle3Head, example: Example, p: int, num_passes: int) -> list[torch.Tensor]:
    """What each pass at the end of a chain returns, as decoding runs it: over all rows, then on one row more."""
    ids = example.token_ids[1 : p + 2].tolist()
    hidden = head.fuse(example.aux[: p + 1].unsqueeze(0))
    outs = []
    head.attend_with(PlainAttention().attend)
    for number in range(num_passes):
        positions = torch.arange(len(ids)).unsqueeze(0)
        out = head(head.embed(torch.tensor([ids])), hidden, positions)[0, -1]
        outs.append(out)
        hidden = torch.cat([hidden, out.view(1, 1, -1)], 1)
        ids = [*ids, int(example.token_ids[p + 2 + number])] if p + 2 + number < len(example.token_ids) else ids
    return outs


@torch.no_grad()
def test_unrolled_passes_are_those_of_decoding(head: Eagle3Head, examples: list[Example]) -> None:
    batch = PaddedBatch.of(examples)
    passes = list(unroll(head, batch, 3))
    for number, example in enumerate(examples):
        for p in range(0, len(example.token_ids) - 3, 4):
            for unrolled, out in zip(passes, chain_of(head, example, p, 3), strict=True):
                torch.testing.assert_close(unrolled[number, p], out, rtol=1e-4, atol=1e-5)


def test_a_pass_is_taught_what_follows_its_token(head: Eagle3Head, examples: list[Example]) -> None:
    """The loss of pass s is the cross entropy of its rows with the target's predictions s positions further."""
    losses = pass_losses(head, PaddedBatch.of(examples), 2)
    for number, (loss, accuracy) in enumerate(losses, start=1):
        entropies, hits = [], []
        for i, hidden in enumerate(list(unroll(head, PaddedBatch.of(examples), 2))[number - 1]):
            example = examples[i]
            for p in range(len(example.token_ids) - number):
                if example.is_taught[p + number]:
                    logits = head.logits(hidden[p])
                    ids = example.teacher_ids[p + number].long()
                    entropies.append(-(example.teacher_probs[p + number] * logits.log_softmax(-1)[ids]).sum())
                    hits.append(float(logits.argmax() == ids[0]))
        torch.testing.assert_close(loss, torch.stack(entropies).mean())
        assert accuracy.item() == pytest.approx(sum(hits) / len(hits))


def test_the_loss_has_its_gradient(head: Eagle3Head, examples: list[Example]) -> None:
    """Against finite differences of one weight of each kind."""
    batch = PaddedBatch.of(examples)
    total = sum(loss for loss, _ in pass_losses(head, batch, 2))
    total.backward()
    for parameter in (head.lm_head.weight, head.midlayer.self_attn.k_proj.weight, head.fc.weight):
        gradient = parameter.grad
        assert gradient is not None
        place = divmod(int(gradient.abs().argmax()), parameter.shape[1])
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter[place] += sign * 1e-2
                values.append(sum(loss.item() for loss, _ in pass_losses(head, batch, 2)))
                parameter[place] -= sign * 1e-2
        assert gradient[place].item() == pytest.approx((values[0] - values[1]) / 2e-2, rel=0.02)


# ---- training ------------------------------------------------------------------------------------------------------


def trained(target: Any, vocabulary: torch.Tensor, examples: list[Example], path: Path, *stops: int) -> Eagle3Head:
    """A head whose training is cut off after each of these numbers of steps, and then ends."""
    recipe = Recipe(epochs=6, batch_size=2, learning_rate=5e-3)
    for steps in (*stops, None):
        head = make_head(target, vocabulary, seed=0)
        trainer = Trainer(head, examples, recipe, {}, path)
        trainer.run(steps)
    assert trainer.step == trainer.num_steps == 18
    return head


def test_a_run_that_was_cut_off_ends_as_if_it_had_not_been(
    target: Any, vocabulary: torch.Tensor, examples: list[Example], tmp_path: Path
) -> None:
    whole = trained(target, vocabulary, examples, tmp_path / "whole.pt")
    parts = trained(target, vocabulary, examples, tmp_path / "parts.pt", 2, 5)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, parts.state_dict()[name]), name


def test_a_state_of_another_run_is_not_taken(head: Eagle3Head, examples: list[Example], tmp_path: Path) -> None:
    Trainer(head, examples, Recipe(epochs=1), {"answers": 7}, tmp_path / "s.pt").run()
    with pytest.raises(ValueError, match=r"s.pt was made with epochs=1, this run has 2; .* delete the file"):
        Trainer(head, examples, Recipe(epochs=2), {"answers": 7}, tmp_path / "s.pt")
    with pytest.raises(ValueError, match=r"s.pt was made with answers=7, this run has 8; .* delete the file"):
        Trainer(head, examples, Recipe(epochs=1), {"answers": 8}, tmp_path / "s.pt")


def test_training_lowers_the_loss_and_leaves_the_target_alone(
    target: Any, vocabulary: torch.Tensor, examples: list[Example], tmp_path: Path
) -> None:
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    batch = PaddedBatch.of(examples)
    losses = []
    for head in (make_head(target, vocabulary, 0), trained(target, vocabulary, examples, tmp_path / "s.pt")):
        with torch.no_grad():
            losses.append([loss.item() for loss, _ in pass_losses(head, batch, 2)])
    assert all(after < first - 0.5 for first, after in zip(*losses, strict=True)), losses
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())
    assert all(parameter.grad is None for parameter in target.parameters())


def test_a_head_starts_with_what_the_target_knows(target: Any, vocabulary: torch.Tensor, head: Eagle3Head) -> None:
    assert torch.equal(head.lm_head.weight, target.get_output_embeddings().weight[vocabulary])
    assert torch.equal(head.norm.weight, target.model.norm.weight)
    layer, own = target.model.layers[-1], head.midlayer
    assert torch.equal(own.mlp.gate_proj.weight, layer.mlp.gate_proj.weight)
    assert torch.equal(own.hidden_norm.weight, layer.input_layernorm.weight)
    assert torch.equal(own.self_attn.q_proj.weight[:, 32:], layer.self_attn.q_proj.weight)
    ids = torch.tensor([5])
    assert torch.equal(head.embed(ids), target.get_input_embeddings()(ids))
    assert not any(parameter.shape[0] == tiny.VOCAB for parameter in head.parameters()), "embeddings are not trained"


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gemma3", "phi3", "gpt2", "gpt_neox", "opt", "mixtral"])
def test_heads_for_all_kinds_of_targets(family: str, tmp_path: Path) -> None:
    """What is made, trained and stored for it is what its engine loads and drafts with."""
    target = tiny.make_model(family)
    prompts = tiny.make_prompts((5, 9))
    generations = [Generation(i, p, tiny.generate(target, p, NEW_TOKENS)) for i, p in enumerate(prompts)]
    vocabulary = choose_vocabulary(generations, 40, tiny.VOCAB)
    head = make_head(target, vocabulary, seed=0)
    examples = collect_examples(target, generations, vocabulary, head.config.aux_layer_ids)
    report = Trainer(head, examples, Recipe(epochs=60, learning_rate=5e-3), {}, tmp_path / "state.pt").run()
    assert report is not None
    assert report.accuracies[0] > 0.6
    save_eagle3(head, tmp_path / "head")
    stats = train_eagle3.measure(target, tmp_path / "head", prompts, NEW_TOKENS, 2)
    assert stats.mean_acceptance_length > 1.5


# ---- acceptance ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def count_accepted(head: Eagle3Head, examples: list[Example], num_drafts: int) -> tuple[int, list[int]]:
    """Rounds, and those in which each draft was right, by unrolling: drafts that are right are the text's own."""
    rounds, accepted = 0, [0] * num_drafts
    for example in examples:
        ids = example.token_ids.tolist()
        passes = unroll(head, PaddedBatch.of([example]), num_drafts)
        drafts = torch.stack([head.target_ids[head.logits(hidden[0]).argmax(-1)] for hidden in passes], -1).tolist()
        p = example.prompt_length - 1
        while p + 3 < len(ids):  # the last token of an answer of full length comes without a draft
            right = [a == b for a, b in zip(drafts[p], ids[p + 2 : -1], strict=False)]
            count = next((i for i, ok in enumerate(right) if not ok), len(right))
            accepted = [n + (i < count) for i, n in enumerate(accepted)]
            rounds, p = rounds + 1, p + 1 + count
    return rounds, accepted


def test_the_engine_accepts_what_training_foresees_and_more_of_a_trained_head(
    target: Any,
    vocabulary: torch.Tensor,
    generations: list[Generation],
    examples: list[Example],
    tmp_path: Path,
) -> None:
    prompts = [generation.prompt_ids for generation in generations]
    lengths = []
    for name, steps in (("untrained", 0), ("half", 12), ("trained", 60)):
        head = make_head(target, vocabulary, seed=0)
        object.__setattr__(head.config, "aux_layer_ids", AUX)
        recipe = Recipe(epochs=20, batch_size=2, learning_rate=5e-3)
        Trainer(head, examples, recipe, {}, tmp_path / f"{name}.pt").run(steps)
        expected = count_accepted(head, examples, 2)
        save_eagle3(head, tmp_path / name)
        stats = train_eagle3.measure(target, tmp_path / name, prompts, NEW_TOKENS, 2)
        assert (stats.num_drafts, list(stats.accepted_per_position)) == expected
        lengths.append(stats.mean_acceptance_length)
    assert lengths[0] < lengths[1] < lengths[2]
    assert lengths[2] > 1.8, "its answers are those it was trained on"


# ---- the script ----------------------------------------------------------------------------------------------------


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    texts = [" ".join(f"w{(i * 7 + j) % 60}" for j in range(2 + i % 4)) for i in range(14)]
    path.write_text("".join(json.dumps({"question": text}) + "\n" for text in texts))
    return path


def run(model: Path, questions: Path, output: Path, *more: str) -> int:
    options = ("--held-out", "4", "--eval-questions", "4", "--max-new", "16", "--draft-vocab-size", "32")
    recipe = ("--epochs", "8", "--batch-size", "2", "--learning-rate", "5e-3")
    places = ("--model", str(model), "--dataset", str(questions), "--output", str(output))
    return train_eagle3.main([*places, *options, *recipe, *more])


def test_from_the_command_line_to_a_head(
    tiny_model: Path,
    questions: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = tmp_path / "head"
    assert run(tiny_model, questions, output) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("4 unseen questions, k=2: mean acceptance length ")
    assert float(last.split()[7].rstrip(";")) > 1.5, last
    model, _ = load_model(str(tiny_model))
    head = load_eagle3(output, target_embeddings=model.get_input_embeddings(), target_config=model.config)
    assert head.config.draft_vocab_size == 32

    weights = (output / "model.safetensors").read_bytes()
    monkeypatch.setattr("eagle3.generations._generate", lambda *args: iter(()))
    monkeypatch.setattr("eagle3.examples._run", None)
    monkeypatch.setattr(Trainer, "_one_step", None)
    assert run(tiny_model, questions, output) == 0, "all of it is kept"
    assert (output / "model.safetensors").read_bytes() == weights
    assert run(tiny_model, questions, output, "--max-new", "17") == 2
    assert "generations.jsonl was made with max_new=16, this run has 17" in capsys.readouterr().err


def test_cut_off_while_training(
    tiny_model: Path,
    questions: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whenever it happens, the head becomes the same."""
    assert run(tiny_model, questions, tmp_path / "whole") == 0
    one_step, left = Trainer._one_step, iter(range(20))

    def interrupted(trainer: Trainer) -> Any:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return one_step(trainer)

    monkeypatch.setattr("eagle3.training._STEPS_PER_STATE", 8)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_one_step", interrupted)
        assert run(tiny_model, questions, tmp_path / "parts") == 130
    assert "the same command goes on" in capsys.readouterr().err
    assert not (tmp_path / "parts" / "model.safetensors").exists()
    assert run(tiny_model, questions, tmp_path / "parts") == 0
    heads = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "parts")]
    assert heads[0] == heads[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--eval-questions", "5", "--held-out", "4"], "--eval-questions 5 exceeds --held-out 4"),
        (["--epochs", "0"], "--epochs 0 must be at least 1"),
        (["--learning-rate", "0"], "--learning-rate 0.0 must be above 0"),
    ],
)
def test_bad_options_are_named(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train_eagle3.parse_args(["--output", "head", *options])
    assert message in capsys.readouterr().err


def test_too_few_questions_are_an_error_with_the_fix(
    tiny_model: Path, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tiny_model, questions, tmp_path / "head", "--held-out", "14") == 2
    assert "--held-out 14 leaves none of the 14 questions" in capsys.readouterr().err
