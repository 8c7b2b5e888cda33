"""The one vocabulary of all lab models: byte-level BPE trained on the Python standard library.

Owns token texts, types and merges.  The corpus is whatever Python runs this, so files built by
different Python versions differ; built twice by the same one, they are the same.
"""

from __future__ import annotations

import functools
import json
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

N_TOKENS = 4096
CORPUS_BYTES = 3_000_000

END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"
CONTROL_TOKENS = (END_OF_TEXT, "<|im_start|>", END_OF_TURN)
# Rendered as text (not dropped) when they are generated, as in the models that inspired them.
MARKUP_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
SPECIAL_TOKENS = CONTROL_TOKENS + MARKUP_TOKENS

# What lab models answer with.  Any sequence of these is split into the same tokens again, so a
# client that sends an answer back continues what the slot holds, as with a trained model.
# In GPT-2's byte alphabet "Ġ" is a space and "Ċ" a line end.
FIRST_WORD = re.compile("[A-Z][a-z]{2,}")
FURTHER_WORD = re.compile("Ġ[a-z]{2,}")
LINE_END = re.compile(".*Ċ")

# llama-server selects its splitting rule by this name; training has to split in the same way.
PRE_TOKENIZER_NAME = "qwen2"
PRE_TOKENIZER_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Vocabulary:
    """Token texts by id (in GPT-2's byte alphabet) and the merges that build them."""

    tokens: list[str]
    merges: list[str]

    def token_types(self) -> list[int]:
        """Return GGUF's type of every token."""
        types = dict.fromkeys(CONTROL_TOKENS, int(gguf.TokenType.CONTROL))
        types.update(dict.fromkeys(MARKUP_TOKENS, int(gguf.TokenType.USER_DEFINED)))
        return [types.get(token, int(gguf.TokenType.NORMAL)) for token in self.tokens]

    def line_end_ids(self) -> list[int]:
        """Return the tokens that end a line."""
        return self._find(LINE_END)

    def first_word_ids(self) -> list[int]:
        """Return the tokens that lab models begin a line with: capitalised words."""
        return self._find(FIRST_WORD)

    def further_word_ids(self) -> list[int]:
        """Return the tokens that lab models use elsewhere: lower-case words after a space."""
        return self._find(FURTHER_WORD)

    def _find(self, pattern: re.Pattern[str]) -> list[int]:
        return [i for i, token in enumerate(self.tokens) if pattern.fullmatch(token)]


@functools.cache
def train_vocabulary() -> Vocabulary:
    """Train the vocabulary; special tokens take the last ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKENIZER_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=N_TOKENS - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_read_corpus(), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return Vocabulary([*tokens, *SPECIAL_TOKENS], [" ".join(pair) for pair in model["merges"]])


def _read_corpus() -> Iterator[str]:
    size_bytes = 0
    for source in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = source.read_text(encoding="utf-8", errors="replace")
        yield text
        size_bytes += len(text)
        if size_bytes > CORPUS_BYTES:
            return
