"""The text encoder of the demo model: one learned vector a word, one a position, nothing else.

As with SD's CLIP a prompt is cut into chunks of 77 tokens, so that long prompts give 154, 231, ... tokens. Unlike CLIP
there are no start and end tokens: an empty prompt is 77 times the padding token, which is what the model was trained
on for "no prompt".
"""

from __future__ import annotations

import difflib
import logging
import re

import torch

CHUNK = 77
PAD = 0


def words(text: str) -> list[str]:
    """Lower-case words and numbers; everything else separates."""
    return re.findall(r"[a-z0-9]+", text.lower())


class TextEncoder:
    """Maps a prompt to context tokens by table look-up.

    vocab: word -> row; token_weight [V, D]; position_weight [77, D].
    """

    def __init__(
        self, vocab: dict[str, int], token_weight: torch.Tensor, position_weight: torch.Tensor, prompts: list[str]
    ):
        self.vocab = vocab
        self.token_weight = token_weight
        self.position_weight = position_weight
        self.prompts = prompts

    def unknown(self, text: str) -> list[str]:
        """Words of the prompt that the model has never seen, each once, in order."""
        return [word for word in dict.fromkeys(words(text)) if word not in self.vocab]

    def tokens(self, text: str) -> torch.Tensor:
        """Token ids [77 * k], padded; unknown words are left out."""
        ids = [self.vocab[word] for word in words(text) if word in self.vocab]
        length = max(1, -(-len(ids) // CHUNK)) * CHUNK
        return torch.tensor(ids + [PAD] * (length - len(ids)))

    def encode(self, text: str) -> torch.Tensor:
        """Context [1, 77 * k, D]. Warns of unknown words; raises ValueError when none of the words is known."""
        missing = self.unknown(text)
        if missing and len(missing) == len(set(words(text))):
            raise ValueError(f"The demo model knows none of the words of this prompt. {self._hint(missing)}")
        if missing:
            logging.warning("AnyShape demo: left out of the prompt: %s", self._hint(missing))
        ids = self.tokens(text)
        positions = self.position_weight.repeat(len(ids) // CHUNK, 1)
        return (self.token_weight[ids] + positions).unsqueeze(0)

    def _hint(self, missing: list[str]) -> str:
        """Each missing word with the known words that are spelt most like it."""
        close = {word: difflib.get_close_matches(word, list(self.vocab), n=3, cutoff=0.6) for word in missing}
        return "; ".join(
            f"'{word}' ({'did you mean ' + ', '.join(near) if near else 'nothing like it is known'})"
            for word, near in close.items()
        )
