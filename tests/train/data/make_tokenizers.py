"""Makes the folders in tests/goldens/tokenizers: small tokenizers as published models have them, with the ids that transformers gives.

    pip install -e '.[reference]' && python tests/train/data/make_tokenizers.py

byte_level is made like Qwen's for chats, whose end of sequence ends a turn; metaspace like Llama 2's, whose texts begin with a token.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, GenerationConfig

OUT = Path(__file__).parents[2] / "goldens" / "tokenizers"
CORPUS = [
    "The rules say what happens at the places that the model names.",
    "An Übung, ein Satz: 12 + 34 = 46.",
    "def f(x):\n    return x\n",
] * 9
TEXTS = ["The model names the rules.", " two  spaces", "", "é, 你好 🙂\n\n", "a<|im_end|>b</s>c", "x = f(12)\n"]


def byte_level():
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, show_progress=False))
    made.add_special_tokens([AddedToken(name, special=True) for name in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    start, end, document = (made.token_to_id(name) for name in ("<|im_start|>", "<|im_end|>", "<|endoftext|>"))
    assert start is not None
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": "{{ messages }}"}
    return made, config, {}, {"eos_token_id": [end, document], "pad_token_id": document}


def metaspace():
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1, right=0)]
    )
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    made.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=330, special_tokens=pieces, show_progress=False))
    # Only the first three of them are special; a trainer knows no other way to keep the bytes.
    stored = json.loads(made.to_str())
    stored["added_tokens"] = stored["added_tokens"][:3]
    made = Tokenizer.from_str(json.dumps(stored))
    made.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)])
    names = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": {"content": "</s>"}, "unk_token": "<unk>"}
    return made, {"pad_token": None, "add_bos_token": False}, names, {"bos_token_id": 1, "eos_token_id": 2}


def expected(folder):
    """What transformers says of a folder."""
    made = AutoTokenizer.from_pretrained(folder)
    rows = [{"text": text, "plain": made.encode(text, add_special_tokens=False), "whole": made.encode(text)} for text in TEXTS]
    for row in rows:
        row["decoded"] = made.decode(row["plain"], clean_up_tokenization_spaces=False)
    eos = GenerationConfig.from_pretrained(folder).eos_token_id
    return {"rows": rows, "eos": made.eos_token_id, "pad": made.pad_token_id, "ends": eos if isinstance(eos, list) else [eos]}


if __name__ == "__main__":
    for make in (byte_level, metaspace):
        folder = OUT / make.__name__
        folder.mkdir(parents=True, exist_ok=True)
        made, config, names, generation = make()
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
        made.save(str(folder / "tokenizer.json"), pretty=False)
        for name, contents in (("tokenizer_config", config), ("special_tokens_map", names), ("generation_config", generation)):
            if contents:
                (folder / f"{name}.json").write_text(json.dumps(contents, indent=1) + "\n")
        (folder / "expected.json").write_text(json.dumps(expected(folder), ensure_ascii=False) + "\n")
