#!/usr/bin/env python3
"""Judges what generation_test wrote with jsonschema and re: exit 1 if a text is not what was asked for.

    NANOVLLM_ALL_SCHEMAS=1 NANOVLLM_GENERATIONS=/tmp/texts build/release/bin/generation_test && tests/constrain/check_generations.py /tmp/texts
"""
import json
import re
import sys

import jsonschema

count = wrong = 0
for line in open(sys.argv[1], encoding="utf-8"):
    entry = json.loads(line)
    kind, asked, text = entry["kind"], entry["asked"], entry["text"]
    count += 1
    try:
        if kind == "json":
            checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
            jsonschema.Draft202012Validator(asked, format_checker=checker).validate(json.loads(text))
        elif kind == "regex":
            assert re.fullmatch(asked, text, re.ASCII)
        else:
            assert text in asked
    except Exception as error:  # whatever a reader of the text would meet
        wrong += 1
        print(f"{kind} {json.dumps(asked)[:300]}\n  {text!r}\n  {str(error)[:200]}")
print(f"{count} texts, {wrong} wrong")
sys.exit(wrong > 0 or count == 0)
