"""A byte-level tokenizer made on the spot: token id = byte value + 3; 0 is pad, 1 is BOS, 2 is EOS."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

PAD, BOS, EOS, OFFSET = 0, 1, 2, 3
VOCAB = 256 + OFFSET


def make_tokenizer(add_bos: bool = False) -> Any:
    """A fast tokenizer over single bytes; with `add_bos` it puts BOS before every text."""
    alphabet = _byte_characters()
    vocab = {"<pad>": PAD, "<s>": BOS, "</s>": EOS} | {alphabet[b]: b + OFFSET for b in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )


def ids_of(text: str) -> list[int]:
    """Token ids of a text, without BOS."""
    return [byte + OFFSET for byte in text.encode()]


def _byte_characters() -> dict[int, str]:
    """The printable character that byte-level BPE writes for each byte (GPT-2's table)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {byte: chr(byte) for byte in plain}
    others = [byte for byte in range(256) if byte not in table]
    return table | {byte: chr(256 + i) for i, byte in enumerate(others)}
