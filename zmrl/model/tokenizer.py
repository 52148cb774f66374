"""Byte-level tokenizer with Kimi K3's control tokens, and its registration with transformers.

Ids 0..255 are bytes of UTF-8 text; 256.. are control tokens; the rest up to the vocabulary size is spare. Text that a
user writes never becomes a control token: `tokenize`, `encode` and `__call__` yield bytes only, also for text that
spells a control token. Control ids come from `apply_chat_template` alone, whose two formats build them structurally:
the training prompts' (`zmrl.data.prompts`) and Kimi K3's (`zmrl.model.chat`, specification 6).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizer
from transformers.tokenization_utils_base import BatchEncoding

CONTROL_TOKENS = (
    "[BOS]", "[EOS]", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>", "<|media_pad|>", "[UNK]", "[PAD]", "[MASK]",
)  # fmt: skip
BOS_ID, EOS_ID, END_OF_MSG_ID, OPEN_ID, CLOSE_ID, SEP_ID, MEDIA_PAD_ID, UNK_ID, PAD_ID, MASK_ID = range(256, 266)
VOCAB_FILE = "byte_vocab.json"


def _byte_symbols() -> list[str]:
    """One printable character per byte (GPT-2's table), so that tokens can be shown and logged."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(rest)) for b in range(256)]


class ByteTokenizer(PreTrainedTokenizer):
    """Byte-level tokenizer. Generation stops at `<|end_of_msg|>`, which is therefore `eos_token` (as in K3's config).

    <|open|>, <|close|> and <|sep|> are not "special" in transformers' sense: decoding keeps them, parsers need them.
    """

    vocab_files_names = {"vocab_file": VOCAB_FILE}
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(self, vocab_file: str | None = None, vocab_size: int = 288, **kwargs: Any) -> None:
        if vocab_file is not None:
            vocab_size = json.loads(Path(vocab_file).read_text())["vocab_size"]
        spare = [f"[SPARE_{i}]" for i in range(vocab_size - 256 - len(CONTROL_TOKENS))]
        self._tokens = [*_byte_symbols(), *CONTROL_TOKENS, *spare]
        self._ids = {token: i for i, token in enumerate(self._tokens)}
        defaults = {
            "bos_token": "[BOS]",
            "eos_token": "<|end_of_msg|>",
            "unk_token": "[UNK]",
            "pad_token": "[PAD]",
            "padding_side": "left",
            "clean_up_tokenization_spaces": False,
        }
        super().__init__(**(defaults | kwargs))

    @property
    def vocab_size(self) -> int:
        """Number of ids, control and spare tokens included."""
        return len(self._tokens)

    def get_vocab(self) -> dict[str, int]:
        """Token string -> id. Byte tokens are single characters, so no control token's name collides with one."""
        return dict(self._ids)

    def get_added_vocab(self) -> dict[str, int]:
        """Nothing is added to the vocabulary (vLLM would put control tokens apart from the text, with spaces)."""
        return {}

    def encode_text(self, text: str) -> list[int]:
        """Plain text -> byte ids, never a control id."""
        return list(text.encode("utf-8", errors="replace"))

    def tokenize(self, text: str, **kwargs: Any) -> list[str]:
        """Plain text -> byte tokens. Overrides the base class, which would split off names of control tokens."""
        return [self._tokens[b] for b in self.encode_text(text)]

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        """No token is added around plain text; the template does that."""
        return token_ids_0 + (token_ids_1 or [])

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Bytes back to text; incomplete UTF-8 becomes U+FFFD; control tokens appear by name."""
        out = bytearray()
        for token in tokens:
            i = self._ids.get(token, UNK_ID)
            out += bytes([i]) if i < 256 else token.encode()
        return out.decode("utf-8", errors="replace")

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]] | list[list[dict[str, Any]]],
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        return_tensors: str | None = None,
        padding: bool | str = False,
        tools: list[Any] | None = None,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Token ids of conversations; arguments and results as in transformers 5.

        `chat_template` names the format. "training", the default, is what the models are trained on
        (`zmrl.data.prompts.render_messages`); it has no tools. "kimi_k3" is what the server asks for
        (`zmrl.model.chat.render_chat`, which takes the other keywords: thinking, tool_choice and so on).

        `tokenize=False` returns text with the control tokens by name, for display only: encoding that text gives
        bytes, not control ids. Raises ValueError for another name, a conversation that the format cannot express, and
        for continuing a message.
        """
        if continue_final_message:
            raise ValueError("this byte-level chat format cannot continue a message; use add_generation_prompt")
        batched = bool(conversation) and isinstance(conversation[0], (list, tuple))
        conversations: list[Any] = conversation if batched else [conversation]
        ids = [self._render(chat_template, c, add_generation_prompt, tools, kwargs) for c in conversations]
        if not tokenize:
            texts = [self.decode(i) for i in ids]
            return texts if batched else texts[0]
        if padding or return_tensors:
            encoding = self.pad({"input_ids": ids}, padding=padding, return_tensors=return_tensors)
        else:
            encoding = BatchEncoding({"input_ids": ids, "attention_mask": [[1] * len(i) for i in ids]})
            if not batched:
                encoding = BatchEncoding({name: rows[0] for name, rows in encoding.items()})
        return encoding if return_dict else encoding["input_ids"]

    @staticmethod
    def _render(
        chat_template: str | None, messages: Any, add_generation_prompt: bool, tools: list[Any] | None, options: Any
    ) -> list[int]:
        from zmrl.data.prompts import render_messages
        from zmrl.model.chat import render_chat

        if chat_template == "kimi_k3":
            return render_chat(messages, tools=tools, add_generation_prompt=add_generation_prompt, **options)
        if chat_template not in (None, "training"):
            raise ValueError(f"no chat format is named {chat_template!r}; use 'training' or 'kimi_k3'")
        if tools:
            raise ValueError("the training prompts' format has no tools; use chat_template='kimi_k3'")
        return render_messages(messages, add_generation_prompt)

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        """Write the one number that defines the vocabulary."""
        file = Path(save_directory) / f"{filename_prefix + '-' if filename_prefix else ''}{VOCAB_FILE}"
        file.write_text(json.dumps({"vocab_size": self.vocab_size}) + "\n")
        return (str(file),)

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return self.tokenize(text)

    def _convert_token_to_id(self, token: str) -> int:
        return self._ids.get(token, UNK_ID)

    def _convert_id_to_token(self, index: int) -> str:
        return self._tokens[index] if 0 <= index < len(self._tokens) else "[UNK]"


def register() -> None:
    """Make AutoConfig and AutoTokenizer know zmrl's model type, in this process; needs no trust_remote_code.

    Idempotent: vLLM's plugin loader and several workers may call it more than once.
    """
    from zmrl.model.config import MODEL_TYPE
    from zmrl.model.hf_config import KimiK31Config

    AutoConfig.register(MODEL_TYPE, KimiK31Config, exist_ok=True)
    AutoTokenizer.register(KimiK31Config, slow_tokenizer_class=ByteTokenizer, exist_ok=True)
