"""Trains the demo model's tokenizer: byte-level BPE with Qwen2's pre-tokeniser, on text drawn from the corpus.

Writes tokenizer.json and tokenizer_config.json into models/demo.
"""

import json

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from corpus import MODEL_DIRECTORY, Corpus
from document import CHAT_TEMPLATE, END_OF_TEXT, IM_END, SPECIAL_TOKENS

VOCAB_SIZE = 1536
SEED = 7
# Words, single digits, punctuation, line ends, spaces: the expression that Qwen2's tokenizer.json has.
PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def training_texts():
    corpus = Corpus(SEED)
    for draw, count in ((corpus.sums, 10_000), (corpus.texts, 30_000)):
        for _ in range(count):
            for segment in draw():
                text = segment.text
                for token in SPECIAL_TOKENS:
                    text = text.replace(token, "")
                yield text


def main() -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PATTERN), behavior="isolated", invert=False),
        pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS), show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(training_texts(), trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS])
    MODEL_DIRECTORY.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(MODEL_DIRECTORY / "tokenizer.json"))

    added = {tokenizer.token_to_id(t): t for t in SPECIAL_TOKENS}
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(i): {"content": t, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
            for i, t in sorted(added.items())
        },
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": IM_END,
        "errors": "replace",
        "model_max_length": 2048,
        "pad_token": END_OF_TEXT,
        "split_special_tokens": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    (MODEL_DIRECTORY / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    print(f"{tokenizer.get_vocab_size()} tokens")


if __name__ == "__main__":
    main()
