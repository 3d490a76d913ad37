"""Token classification with a Hugging Face model: padded batches, labels of -100, outputs.loss and predictions."""

import torch
from common import arguments, save, tell
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForTokenClassification

#: import memfit

LABELS = 5


def sentences(n):
    generator = torch.Generator().manual_seed(0)
    for _ in range(n):
        length = int(torch.randint(5, 17, (1,), generator=generator))
        ids = torch.randint(4, 100, (length,), generator=generator)
        labels = ids % LABELS
        labels[torch.rand(length, generator=generator) < 0.2] = -100  # parts of words
        yield {"input_ids": ids, "labels": labels}


def collate(features):
    longest = max(len(f["input_ids"]) for f in features)
    batch = {"input_ids": [], "attention_mask": [], "labels": []}
    for f in features:
        short = longest - len(f["input_ids"])
        batch["input_ids"].append(torch.cat([f["input_ids"], torch.zeros(short, dtype=torch.long)]))
        batch["attention_mask"].append(torch.cat([torch.ones(longest - short), torch.zeros(short)]).long())
        batch["labels"].append(torch.cat([f["labels"], torch.full((short,), -100)]))
    return {name: torch.stack(values) for name, values in batch.items()}


def main():
    args = arguments(__doc__, batch_size=16)
    config = BertConfig(
        vocab_size=100, hidden_size=32 * args.width, num_hidden_layers=2, num_attention_heads=4, num_labels=LABELS,
        intermediate_size=64 * args.width, max_position_embeddings=32,
        hidden_dropout_prob=args.dropout, attention_probs_dropout_prob=args.dropout,
    )  # fmt: skip
    model = BertForTokenClassification(config)
    dataset = list(sentences(200 * args.times))
    train_dataloader = DataLoader(dataset, shuffle=True, collate_fn=collate, batch_size=args.batch_size)
    no_decay = ["bias", "LayerNorm.weight"]
    grouped = [
        {"params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)], "weight_decay": 0.01},
        {"params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(grouped, lr=1e-3)
    lr_scheduler = LambdaLR(optimizer, lambda step: max(0.0, 1 - step / args.steps))
    #: model, optimizer, train_dataloader = memfit.wrap(model, optimizer, train_dataloader, target_batch=args.batch_size)

    model.train()
    right = seen = 0
    for step, batch in enumerate(train_dataloader):
        outputs = model(**batch)
        loss = outputs.loss
        loss.backward()
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        predictions = outputs.logits.argmax(dim=-1)
        valid = batch["labels"] != -100
        right, seen = right + int((predictions == batch["labels"])[valid].sum()), seen + int(valid.sum())
        tell(step, loss)
        if step + 1 == args.steps:
            break
    print(f"accuracy {right / seen:.4f}")
    save(args, model)


if __name__ == "__main__":
    main()
