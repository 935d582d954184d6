"""Trains sample/tiny-story, a Llama of 3.7 million parameters that imitates Jane Austen's novels.

    apt-get download r-cran-janeaustenr
    python scripts/quality/train_tiny_story.py text r-cran-janeaustenr_1.0.0-1_all.deb novels.txt
    python scripts/quality/train_tiny_story.py train novels.txt sample/tiny-story

The text is her six novels (1811 to 1817, in the public domain) from Debian's package
r-cran-janeaustenr. `train` takes a minute on an H200. The seed is fixed, but GPUs add in varying
order, so the last bits of the weights differ from run to run. Made with torch 2.11.0, tokenizers
0.23.2 and safetensors 0.8.0.
"""

import argparse
import io
import json
import lzma
import math
import re
import struct
import tarfile
import time
import zlib
from pathlib import Path

SEED = 1813
VOCABULARY = 2048
CONTEXT = 512
START = "<|endoftext|>"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 256,
    "initializer_range": 0.02,
    "intermediate_size": 768,
    "max_position_embeddings": CONTEXT,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": VOCABULARY,
}


# The text


def members_of_deb(path):
    """Returns the files of a Debian package: an `ar` archive that contains `data.tar.xz`."""
    with open(path, "rb") as file:
        assert file.read(8) == b"!<arch>\n", f"{path} is no Debian package"
        while header := file.read(60):
            name, size = header[:16].decode().strip().rstrip("/"), int(header[48:58])
            data = file.read(size + size % 2)[:size]
            if name == "data.tar.xz":
                archive = tarfile.open(fileobj=io.BytesIO(lzma.decompress(data)))
                return {member.name: archive.extractfile(member).read() for member in archive if member.isfile()}
    raise SystemExit(f"{path} has no data.tar.xz")


def string_vectors(database):
    """Yields the objects of an R lazy-load database of string vectors.

    Each object is a length followed by zlib data.
    """
    at = 0
    while at < len(database):
        stream = zlib.decompressobj()
        data = stream.decompress(database[at + 4 :])
        at = len(database) - len(stream.unused_data)
        # R's serialization, version 3, big-endian: three versions, the encoding, then the vector
        # (type 16) of strings (type 9).
        assert data[:6] == b"X\n\0\0\0\3", "R's serialization is another version"
        place = 18 + struct.unpack_from(">i", data, 14)[0]
        flags, count = struct.unpack_from(">ii", data, place)
        assert flags & 0xFF == 16, "no vector of strings"
        place += 8
        lines = []
        for _ in range(count):
            flags, length = struct.unpack_from(">ii", data, place)
            assert flags & 0xFF == 9, "no string"
            lines.append(data[place + 8 : place + 8 + length].decode())
            place += 8 + length
        yield lines


def paragraphs(lines):
    """Yields one string per paragraph, and an empty one before each chapter. Omits titles."""
    text = "\n".join(line.strip() for line in lines).replace("_", "")
    chapters = re.split(r"\n+(?:VOLUME [IVX]+\n+)?(?:CHAPTER|Chapter) [IVXLC\d]+\.?\n+", text)[1:]
    for chapter in chapters:
        yield ""
        for paragraph in re.split(r"\n{2,}", chapter):
            paragraph = " ".join(paragraph.split())
            if len(paragraph) > 1 and not re.fullmatch(r"(VOLUME [IVX]+|FINIS|THE END)\.?", paragraph, re.IGNORECASE):
                yield paragraph


def text(package, out):
    """Writes the novels, one paragraph per line.

    An empty line precedes each chapter, a form feed each novel but the first.
    """
    database = next(data for name, data in members_of_deb(package).items() if name.endswith("data/Rdata.rdb"))
    novels = ["\n".join(paragraphs(lines)) for lines in string_vectors(database)]
    Path(out).write_text("\f".join(novels), encoding="utf-8")
    print(f"{len(novels)} novels, {sum(map(len, novels))} characters")


def split(novels):
    """Returns the training, validation and held-out texts.

    The latter two come from the end of each novel: validation decides when to stop.
    """
    parts = ([], [], [])
    for novel in novels.split("\f"):
        lines = novel.split("\n")
        ends = [int(len(lines) * share) for share in (0.97, 0.985, 1.0)]
        for part, begin, end in zip(parts, [0, *ends], ends):
            part.append("\n".join(lines[begin:end]).strip("\n"))
    return ["\n\n".join(part) for part in parts]


# The model


def model_of(config, dropout):
    """Returns a model equal to transformers' LlamaForCausalLM, with its parameter names."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    hidden, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    dim = config["head_dim"]

    class RmsNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(hidden))

        def forward(self, x):
            return F.rms_norm(x.float(), (hidden,), eps=config["rms_norm_eps"]).to(x.dtype) * self.weight.to(x.dtype)

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj = nn.Linear(hidden, heads * dim, bias=False)
            self.k_proj = nn.Linear(hidden, kv_heads * dim, bias=False)
            self.v_proj = nn.Linear(hidden, kv_heads * dim, bias=False)
            self.o_proj = nn.Linear(heads * dim, hidden, bias=False)

        def forward(self, x, cos, sin):
            batch, length, _ = x.shape
            q = self.q_proj(x).view(batch, length, heads, dim).transpose(1, 2)
            k = self.k_proj(x).view(batch, length, kv_heads, dim).transpose(1, 2)
            v = self.v_proj(x).view(batch, length, kv_heads, dim).transpose(1, 2)

            def rotate(t):
                first, second = t.chunk(2, -1)
                return t * cos + torch.cat((-second, first), -1) * sin

            q, k = rotate(q).to(v.dtype), rotate(k).to(v.dtype)
            k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.o_proj(out.transpose(1, 2).reshape(batch, length, heads * dim))

    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj = nn.Linear(hidden, config["intermediate_size"], bias=False)
            self.up_proj = nn.Linear(hidden, config["intermediate_size"], bias=False)
            self.down_proj = nn.Linear(config["intermediate_size"], hidden, bias=False)

        def forward(self, x):
            return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.input_layernorm, self.post_attention_layernorm = RmsNorm(), RmsNorm()
            self.self_attn, self.mlp, self.dropout = Attention(), Mlp(), nn.Dropout(dropout)

        def forward(self, x, cos, sin):
            x = x + self.dropout(self.self_attn(self.input_layernorm(x), cos, sin))
            return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed_tokens = nn.Embedding(config["vocab_size"], hidden)
            self.layers = nn.ModuleList(Layer() for _ in range(config["num_hidden_layers"]))
            self.norm, self.dropout = RmsNorm(), nn.Dropout(dropout)
            angles = torch.outer(torch.arange(CONTEXT), config["rope_theta"] ** -(torch.arange(0, dim, 2) / dim)).repeat(1, 2)
            self.register_buffer("cos", angles.cos(), persistent=False)
            self.register_buffer("sin", angles.sin(), persistent=False)

        def forward(self, tokens):
            x = self.dropout(self.embed_tokens(tokens))
            for layer in self.layers:
                x = layer(x, self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]])
            return self.norm(x)

    class Llama(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = Model()
            for name, parameter in self.named_parameters():
                if parameter.dim() == 2:
                    # Layers that add to the residual stream start smaller in deeper models.
                    ends = name.endswith(("o_proj.weight", "down_proj.weight"))
                    nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * config["num_hidden_layers"]) if ends else 1))

        def forward(self, tokens):
            return F.linear(self.model(tokens), self.model.embed_tokens.weight)

    return Llama()


# Training


def tokenizer_of(text):
    """Byte-level BPE, trained on the text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=[START], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(text.split("\n"), trainer)
    return tokenizer


def tokens_of(tokenizer, text):
    """Returns the tokens of a text. Each chapter begins with the start token."""
    chapters = [chapter for chapter in text.split("\n\n") if chapter]
    return [token for chapter in chapters for token in [0, *tokenizer.encode(chapter + "\n").ids]]


def loss_on(model, tokens, device):
    """Returns the mean cross entropy per token, in windows that begin with the start token."""
    import torch
    import torch.nn.functional as F

    total = count = 0
    with torch.no_grad():
        for begin in range(0, len(tokens) - 1, CONTEXT - 1):
            piece = torch.tensor([0, *tokens[begin : begin + CONTEXT - 1]], device=device)
            logits = model(piece[None, :-1])[0].float()
            total += F.cross_entropy(logits, piece[1:], reduction="sum").item()
            count += len(piece) - 1
    return total / count


def train(source, out, steps, batch, rate, dropout, decay):
    import torch
    import torch.nn.functional as F
    from safetensors.torch import save_file

    torch.manual_seed(SEED)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    training, validation, heldout = split(Path(source).read_text(encoding="utf-8"))
    tokenizer = tokenizer_of(training)
    pieces = [tokens_of(tokenizer, text) for text in (training, validation, heldout)]
    data = torch.tensor(pieces[0], device=device)
    model = model_of(CONFIG, dropout).to(device)
    print(f"{sum(p.numel() for p in model.parameters())} parameters; tokens: {[len(piece) for piece in pieces]}", flush=True)

    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))
    warm = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))
    )
    best, kept, start = math.inf, None, time.time()
    for step in range(1, steps + 1):
        model.train()
        begins = torch.randint(len(data) - CONTEXT, (batch, 1), device=device)
        rows = data[begins + torch.arange(CONTEXT + 1, device=device)]
        with torch.autocast(device, torch.bfloat16):
            logits = model(rows[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % max(1, steps // 20) == 0 or step == steps:
            model.eval()
            found = loss_on(model, pieces[1], device)
            print(f"step {step}: training {loss.item():.4f}, validation {found:.4f}, {time.time() - start:.0f} s", flush=True)
            if found < best:
                best, kept = found, {name: value.detach().to(torch.bfloat16) for name, value in model.state_dict().items()}

    model.load_state_dict(kept)
    model.eval()
    print(f"perplexity of the held-out text, weights in bf16: {math.exp(loss_on(model, pieces[2], device)):.3f}")
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    save_file({name: value.cpu().contiguous() for name, value in kept.items()}, out / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "heldout.txt").write_text(heldout + "\n", encoding="utf-8")
    generation = {"bos_token_id": 0, "eos_token_id": 0, "do_sample": False}
    names = {"bos_token": START, "eos_token": START, "model_max_length": CONTEXT, "tokenizer_class": "PreTrainedTokenizerFast"}
    for name, value in (("config", CONFIG), ("generation_config", generation), ("tokenizer_config", names)):
        (out / f"{name}.json").write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

    prompt = tokenizer.encode("It was a truth universally").ids
    with torch.no_grad():
        tokens = torch.tensor([[0, *prompt]], device=device)
        for _ in range(60):
            tokens = torch.cat((tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)), 1)
    print(tokenizer.decode(tokens[0, 1:].tolist()))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    of_text = commands.add_parser("text", help="write the novels of the Debian package as one file")
    of_text.add_argument("package")
    of_text.add_argument("out")
    of_train = commands.add_parser("train", help="train the tokenizer and the model, and write the sample")
    of_train.add_argument("text")
    of_train.add_argument("out")
    of_train.add_argument("--steps", type=int, default=2400)
    of_train.add_argument("--batch", type=int, default=32, help="windows of 512 tokens per step")
    of_train.add_argument("--rate", type=float, default=2e-3)
    of_train.add_argument("--dropout", type=float, default=0.2)
    of_train.add_argument("--decay", type=float, default=0.1)
    options = parser.parse_args()
    if options.command == "text":
        text(options.package, options.out)
    else:
        train(options.text, options.out, options.steps, options.batch, options.rate, options.dropout, options.decay)


if __name__ == "__main__":
    main()
