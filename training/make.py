"""Makes the embedded model: `python -m training.make --out leyline_server/assets/tiny [--steps N] [--minutes M]`.

The tokenizer is made first unless it is there already; `--resume` goes on from the weights in --out. `--edited-share`
trains on batches whose tool outputs are cut out of the KV cache on the way, as AMORTIZE cuts them; the kinds of task
hang on `--kinds` alone, so a run with edits and one without are given the same ones.
"""

from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer
from transformers import DeepseekV2ForCausalLM

from training.model import new_model
from training.tasks import ALL_KINDS, KINDS
from training.tokenizer import save_tokenizer
from training.train import Recipe, save_weights, train


def main(argv: Sequence[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--minutes", type=float, default=Recipe.minutes, help="end within this time, cosine included")
    parser.add_argument("--learning-rate", type=float, default=Recipe.learning_rate)
    parser.add_argument("--tokens-per-step", type=int, default=Recipe.tokens_per_step)
    parser.add_argument("--easy-until", type=float, default=Recipe.easy_until)
    parser.add_argument("--long-from", type=float, default=Recipe.long_from)
    parser.add_argument(
        "--edited-share", type=float, default=Recipe.edited_share, help="of batches, cut as by AMORTIZE"
    )
    parser.add_argument(
        "--kinds", nargs="+", choices=("all", *ALL_KINDS), default=KINDS, help="of task, in equal shares"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=Recipe.num_workers)
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args(argv)

    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer_path = args.out / "tokenizer.json"
    if not tokenizer_path.exists():
        save_tokenizer(args.out)
    if args.resume:
        model = DeepseekV2ForCausalLM.from_pretrained(args.out).float()
    else:
        model = new_model(Tokenizer.from_file(str(tokenizer_path)).get_vocab_size(), args.seed)
    recipe = Recipe(
        steps=args.steps,
        minutes=args.minutes,
        tokens_per_step=args.tokens_per_step,
        learning_rate=args.learning_rate,
        seed=args.seed,
        num_workers=args.workers,
        device=args.device,
        easy_until=args.easy_until,
        long_from=args.long_from,
        edited_share=args.edited_share,
        kinds=tuple(kind for kind in ALL_KINDS if kind in args.kinds or "all" in args.kinds),
    )
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    train(model, tokenizer_path, recipe, checkpoint=args.out)
    save_weights(model, args.out)


if __name__ == "__main__":
    main()
