"""A task of lm-eval, by log-likelihoods and by generation; the last line has its scores.

It is run by the tests of real models, with the folder of the tokenizer.
"""

import json
import sys
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

CAPITALS = {
    "France": "Paris",
    "Germany": "Berlin",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Portugal": "Lisbon",
    "Japan": "Tokyo",
    "Russia": "Moscow",
    "Greece": "Athens",
    "Egypt": "Cairo",
    "China": "Beijing",
    "Cuba": "Havana",
    "Ireland": "Dublin",
    "Poland": "Warsaw",
    "Norway": "Oslo",
    "Sweden": "Stockholm",
    "Hungary": "Budapest",
    "Austria": "Vienna",
    "Peru": "Lima",
    "Kenya": "Nairobi",
    "India": "New Delhi",
}
COMMON = """
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
doc_to_text: "The capital of {{{{country}}}} is"
"""
CHOSEN = """
task: chosen
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: "{{target}}"
metric_list:
  - metric: acc
"""
WRITTEN = """
task: written
output_type: generate_until
generation_kwargs:
  until: [".", ",", "\\n"]
  max_gen_toks: 4
  do_sample: false
filter_list:
  - name: stripped
    filter:
      - function: regex
        regex_pattern: "([A-Z][a-z]+(?: [A-Z][a-z]+)?)"
      - function: take_first
doc_to_target: "{{capital}}"
metric_list:
  - metric: exact_match
"""


def main(url: str, folder: str) -> None:
    cities = list(CAPITALS.values())
    rows = []
    for index, (country, capital) in enumerate(CAPITALS.items()):
        choices = [cities[(index + step) % len(cities)] for step in range(4)]
        target = index % 4
        choices[0], choices[target] = choices[target], choices[0]
        rows.append({"country": country, "capital": capital, "choices": choices, "target": target})
    tasks = Path("tasks")
    tasks.mkdir()
    data = tasks.absolute() / "capitals.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in (("chosen", CHOSEN), ("written", WRITTEN)):
        (tasks / f"{name}.yaml").write_text(COMMON.format(data=data) + text)
    results = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "model": "SmolLM2-135M-Instruct.Q4_1",
            "base_url": f"{url}/v1/completions",
            "tokenizer": folder,
            "tokenizer_backend": "huggingface",
            "max_length": 512,
        },
        tasks=["chosen", "written"],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
    )["results"]
    scores = {
        "chosen": results["chosen"]["acc,none"],
        "written": results["written"]["exact_match,stripped"],
    }
    print(json.dumps(scores))


if __name__ == "__main__":
    main(*sys.argv[1:])
