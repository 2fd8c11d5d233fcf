"""Tokenizers as models have them, small and made here, and their files."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

SPECIAL = ["<s>", "</s>", "<|end|>"]
PLAIN = AddedToken("<tool name>", special=False)
WORDS = ["a", "b", "c", ".", "ab", "bc", "abc", "stop", "\n", "\n\n", "é", "€", "🤣", "中文", "\ufffd"]


def byte_level() -> Tokenizer:
    """As GPT-2's, Llama 3's and Qwen's: every byte is a token, and pieces of characters are tokens too."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()

    def spelt(text: bytes) -> str:
        return "".join(letters[byte] for byte in text)

    words = [word.encode() for word in WORDS] + [
        b" a",
        b" stop",
        "🤣".encode()[:3],
        b"x\xe2\x82",
        b"\xac.",
        b"\xac\xe2",
    ]
    names = [spelt(bytes([byte])) for byte in range(256)]
    names += [name for name in dict.fromkeys(map(spelt, words)) if name not in names]
    made = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def byte_fallback() -> Tokenizer:
    """As Llama 2's and Gemma's: words, spaces as a character, and bytes for what the vocabulary lacks."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += ["▁", "▁a", "▁stop", *WORDS[:8], "é", "中文"]
    made = Tokenizer(
        models.BPE({name: index for index, name in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True)
    )
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(Regex(" "), "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


def save(made: Tokenizer, place: Path) -> None:
    """Write the files of a tokenizer, with special tokens and one that is none, into a model's directory."""
    from transformers import PreTrainedTokenizerFast

    made.add_special_tokens(SPECIAL)
    made.add_tokens([PLAIN])
    PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>").save_pretrained(place)
