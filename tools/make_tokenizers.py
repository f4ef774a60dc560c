#!/usr/bin/env python3
"""Trains the small tokenizers of tests/data/tokenizers with the Hugging Face library, and writes what that library makes of a
list of texts: expected.json holds, for every text, ids with and without special tokens, ids with special-token text taken
as plain text, and the decoded text with and without special tokens.

Needs tokenizers 0.23. The output is the same at every run.
"""
import json
import pathlib
import random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TARGET = pathlib.Path(__file__).resolve().parent.parent / "tests/data/tokenizers"
SUBJECTS = "The scheduler|A sequence|Every block|The prefix cache|One worker|Our tokenizer|The reader|A small model".split("|")
VERBS = "doesn't keep|has stored|will free|counts|reads|we'll merge|can't split|returns|I'm watching|they've seen".split("|")
OBJECTS = "the token ids|42 pages of memory|a table of 1024 entries|its neighbours|prompts in UTF-8|naïve café menus".split("|")
TAILS = [".", "!", ", again and again.", " (see page 7).", ":\n\n    return x + 1;\n", "; über schöne Straßen.", "。東京は大きい都市です。", " Привет, мир!"]

QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
GPT4O = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ]
)
DEEPSEEK = [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+"]
PCRE = r"(?<=[a-z])\d+|\b\w+\b|[[:punct:]]|\s+"  # look-behind, word boundary, POSIX class: beyond our own matcher


def corpus():
    rng = random.Random(7)
    return [" ".join([rng.choice(SUBJECTS), rng.choice(VERBS), rng.choice(OBJECTS)]) + rng.choice(TAILS) for _ in range(3000)]


def texts():
    rng = random.Random(11)
    fixed = ["", " ", "  ", "a", "\n", "\r\n", " \n \n", "\t\tx", "Hello world", " Hello  world ", "I'M HERE, it'S they'LL", "'ſ 'S",
             "12345678 ٣٤ ²½ Ⅷ", "naïve cafe\u0301 A\u030a \u1e9b\u0323", "각 \uac00\u11a8 \u1100\u1161\u11a8", "İstanbul ΣΑΣ ß",
             "東京は大きい。한국어 เมือง", "😀👨‍👩‍👧🇩🇪 ☃️", "\u0000a\u0000", "\u00a0x\u3000y\u2028z\u0085w\u180ev", "▁ ▁▁a ▁", "Ġ Ċ",
             "<0x0A> <0x41>", "a" * 300, " " * 100, "\n" * 50, "=" * 70, "😀" * 20, "ab " * 40, "<s>", "</s>x", "x<s> y </s>",
             "<unk>", " <|im_end|> ", "<|im_start|>user\nhi<|im_end|>\n", "<|im_", "<|im_end", "word", "a word b", "aword", "word!",
             "(word)", " wordword word", "left   ", "x   left y", "x right   y", "right", "x right\n\n  right y", " both  both ", "BOTH",
             "both", "NoRm norm NORM", "é e\u0301", "[A][B][AB][ABC]", "[AB", "x[ABCx", "foo.bar(baz)[0] += 1; // ok\n", "\ud801\udcb0 𐓘"[1:],
             "\U0001e920 \U000105c0 \ua7cb", "ﬁne ① ㍻ ½", "  lead", "trail  ", "x\u0323\u0307 x\u0307\u0323"]
    fixed = [text.encode("utf-8", "ignore").decode() for text in fixed]
    lines = corpus()
    pool = "abcXYZ  \n\t'.,!?09éüßñ東京の한글дж😀\u0301\u0323▁<>|[]s"
    mixed = ["".join(rng.choice(pool) for _ in range(rng.randrange(1, 40))) for _ in range(60)]
    tokens = ["<s>", "</s>", "<|im_end|>", "word", " left", "right ", "both", "NORM", "[AB]", "[ABC]", "[A", "é"]
    inserted = ["".join(rng.choice(tokens + [" ", "x", "\n", " word "]) for _ in range(rng.randrange(2, 9))) for _ in range(30)]
    return fixed + [rng.choice(lines) for _ in range(10)] + mixed + inserted


def byte_level(pattern, vocab_size=900, **options):
    tokenizer = Tokenizer(models.BPE())
    splits = [pre_tokenizers.Split(Regex(p), "isolated") for p in ([pattern] if isinstance(pattern, str) else pattern or [])]
    digits = [pre_tokenizers.Digits(individual_digits=True)] if options.get("digits") else []
    byte = pre_tokenizers.ByteLevel(add_prefix_space=options.get("add_prefix_space", False), use_regex=pattern is None)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits + digits + [byte]) if splits or digits else byte
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.normalizer = options.get("normalizer")
    train(tokenizer, vocab_size, alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.add_special_tokens(["<s>", "</s>", "<|im_start|>", "<|im_end|>"])
    return tokenizer


def sentencepiece(vocab_size=1100):
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    special = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    return tokenizer, vocab_size, special


def train(tokenizer, vocab_size, alphabet=(), special=()):
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=list(alphabet), special_tokens=list(special), limit_alphabet=300, show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)


def without_byte_tokens(tokenizer):
    """Byte tokens belong to the vocabulary, but are no added tokens."""
    data = json.loads(tokenizer.to_str())
    data["added_tokens"] = [token for token in data["added_tokens"] if not token["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(data))


def llama():
    tokenizer, size, special = sentencepiece()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")  # for training only: words
    train(tokenizer, size, special=special)
    tokenizer.pre_tokenizer = None
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", "<s> $A </s> <s> $B </s>", [("<s>", 1), ("</s>", 2)])
    return without_byte_tokens(tokenizer)


def metaspace():
    tokenizer, size, special = sentencepiece()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    train(tokenizer, size, special=special)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 1)])
    return without_byte_tokens(tokenizer)


def added():
    """Added tokens with every flag."""
    tokenizer = byte_level(QWEN2, normalizer=normalizers.Lowercase())
    tokenizer.add_tokens(
        [
            AddedToken("word", single_word=True, normalized=False),
            AddedToken("left", lstrip=True, normalized=False),
            AddedToken("right", rstrip=True, normalized=False),
            AddedToken("both", lstrip=True, rstrip=True, single_word=True, normalized=False),
            AddedToken("NoRm", normalized=True),
            AddedToken("é", normalized=True, special=False),
            AddedToken("[A]", normalized=False),
            AddedToken("[AB]", normalized=False),
            AddedToken("[ABC", normalized=False, special=True),
            AddedToken("[a", normalized=True, special=True),
        ]
    )
    return tokenizer


def normalizers_of_all_kinds():
    steps = [normalizers.NFKC(), normalizers.Replace(Regex(r" {2,}"), " "), normalizers.Replace("東京", "Tokyo"),
             normalizers.Lowercase(), normalizers.NFD(), normalizers.NFC(), normalizers.Strip()]
    return byte_level(LLAMA3, normalizer=normalizers.Sequence(steps))


def splits():
    """Every behaviour of Split, and a pattern that only PCRE2 knows."""
    tokenizer = byte_level(QWEN2)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PCRE), "isolated"),
            pre_tokenizers.Split(",", "merged_with_previous"),
            pre_tokenizers.Split(Regex("[.!]"), "merged_with_next"),
            pre_tokenizers.Split(Regex(r"\s"), "contiguous"),
            pre_tokenizers.Split("=", "removed"),
            pre_tokenizers.Split(Regex(r"[^x]"), "isolated", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer


def words():
    """Whitespace and Punctuation, as a sequence of steps."""
    tokenizer = byte_level(None)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Punctuation("merged_with_next"), pre_tokenizers.Punctuation(),
         pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return tokenizer


def unknown():
    """No byte fallback: unknown characters become <unk>, one each; no decoder."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Digits()])
    train(tokenizer, 500, special=["<unk>", "<s>"])
    return tokenizer


def ignore_merges():
    tokenizer = byte_level(GPT4O)
    tokenizer.model.ignore_merges = True
    tokenizer.add_tokens(["<|im_sep|>"])
    data = json.loads(tokenizer.to_str())
    data["model"]["merges"] = data["model"]["merges"][:200]  # most tokens are now only found whole
    return Tokenizer.from_str(json.dumps(data))


def old_layout(tokenizer):
    """As files before tokenizers 0.20 are: merges as "a b", no model.type."""
    data = json.loads(tokenizer.to_str())
    data["model"]["merges"] = [" ".join(pair) for pair in data["model"]["merges"]]
    del data["model"]["type"]
    return json.dumps(data)


def main():
    tokenizers = {
        "gpt2": byte_level(None, add_prefix_space=True),
        "llama3": byte_level(LLAMA3),
        "qwen2": byte_level(QWEN2, normalizer=normalizers.NFC()),
        "gpt4o": ignore_merges(),
        "deepseek": byte_level(DEEPSEEK, digits=True),
        "llama": llama(),
        "metaspace": metaspace(),
        "added": added(),
        "normalizers": normalizers_of_all_kinds(),
        "splits": splits(),
        "unknown": unknown(),
        "words": words(),
    }
    for name, tokenizer in tokenizers.items():
        text = old_layout(tokenizer) if name in ("gpt2", "llama") else tokenizer.to_str()
        directory = TARGET / name
        directory.mkdir(parents=True, exist_ok=True)
        data = json.loads(text)
        (directory / "tokenizer.json").write_text(json.dumps(data, ensure_ascii=False, separators=(",", ":")) + "\n")
        tokenizer = Tokenizer.from_str(text)
        rows = []
        for string in texts():
            ids = tokenizer.encode(string, add_special_tokens=False).ids
            with_special = tokenizer.encode(string).ids
            tokenizer.encode_special_tokens = True
            plain = tokenizer.encode(string, add_special_tokens=False).ids
            tokenizer.encode_special_tokens = False
            row = {"text": string, "ids": ids, "decoded": tokenizer.decode(ids, skip_special_tokens=False),
                   "decoded_skip": tokenizer.decode(with_special, skip_special_tokens=True)}
            row |= {"ids_special": with_special} if with_special != ids else {}
            row |= {"ids_plain": plain} if plain != ids else {}
            rows.append(json.dumps(row, ensure_ascii=True, separators=(",", ":")))
        (directory / "expected.json").write_text("[\n" + ",\n".join(rows) + "\n]\n")
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>",
              "chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}
    (TARGET / "llama" / "tokenizer_config.json").write_text(json.dumps(config) + "\n")


if __name__ == "__main__":
    main()
