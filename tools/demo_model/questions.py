"""The questions that the demo model can answer: about how LLM engines work and about this one.

Each entry has the canonical question first, then other wordings of it; `topic` entries also get the wordings of
TOPIC_WORDINGS ("Explain {topic}." ...). The answers are learned word for word.
"""

from dataclasses import dataclass, field
from random import Random

TOPIC_WORDINGS = [
    "What is {t}?", "What's {t}?", "Explain {t}.", "Can you explain {t}?", "Please explain {t}.", "Tell me about {t}.",
    "What does {t} mean?", "Define {t}.", "Describe {t}.", "What do you know about {t}?", "What exactly is {t}?",
    "Could you tell me what {t} is?", "I would like to understand {t}.", "Explain {t} in one sentence.",
    "What is meant by {t}?", "Give me a short explanation of {t}.", "How would you describe {t}?", "{t}?", "{t}",
    "How does {t} work?", "What is the idea of {t}?",
]
# Never used in training: evaluate.py measures with them how far the model goes beyond the wordings it saw.
UNSEEN_TOPIC_WORDINGS = ["Can you tell me about {t}?", "Please tell me what {t} means.", "What is {t} exactly?"]


@dataclass
class Question:
    answer: str
    wordings: list[str] = field(default_factory=list)
    topics: list[str] = field(default_factory=list)

    @property
    def canonical(self) -> str:
        return self.wordings[0] if self.wordings else f"What is {self.topics[0]}?"


def topic(answer: str, *topics: str, also: list[str] | None = None) -> Question:
    question = Question(answer, list(also or []), list(topics))
    question.wordings.insert(0, f"What is {topics[0]}?")
    return question


def ask(answer: str, *wordings: str) -> Question:
    return Question(answer, list(wordings))


QUESTIONS = [
    # Memory
    topic("Paged attention keeps the KV cache in small blocks of equal size that need not be neighbours in memory. "
          "A block table tells the attention kernel where each block of a sequence lies.",
          "paged attention", "PagedAttention", also=["How does paged attention work?"]),
    ask("Memory is handed out block by block as a sequence grows, so nothing is reserved for tokens that may never come. "
        "At most the last block of each sequence is partly empty.",
        "Why does paged attention save memory?", "How does paged attention save memory?",
        "Why is paged attention good for memory?", "What is the advantage of paged attention?",
        "Why do we need paged attention?", "Why use paged attention?", "What problem does paged attention solve?"),
    topic("A block table is a list for each sequence that maps its logical blocks to physical blocks of the KV cache. "
          "It is the page table of paged attention.", "a block table", "the block table", "block_table"),
    topic("The slot mapping gives, for each token of a step, the place in the KV cache where its key and value are written.",
          "the slot mapping", "slot mapping", "slot_mapping", "a slot mapping"),
    topic("The KV cache holds the keys and values of all tokens so far, for every layer. "
          "With it each new token needs only its own forward pass instead of the whole text again.",
          "the KV cache", "a KV cache", "KV cache", also=["What does the KV cache store?", "What is the KV cache for?",
                                                         "Why do we need a KV cache?"]),
    ask("Each token takes 2 x layers x KV heads x head size values: one key and one value per layer and KV head. "
        "In bf16 each value takes two bytes.",
        "How large is the KV cache?", "How big is the KV cache?", "How much memory does the KV cache need?",
        "How much memory does a token take in the KV cache?", "How do I compute the size of the KV cache?",
        "What is the size of the KV cache?", "How many bytes does the KV cache take per token?"),
    topic("A KV block is a fixed number of token slots in the KV cache, for example 16 or 64. "
          "Blocks are the unit in which cache memory is allocated, shared and freed.",
          "a KV block", "a cache block", "the block size", "a block of the KV cache", "block size"),
    topic("The block manager hands out KV blocks, counts who uses them, and keeps freed blocks for the prefix cache "
          "until their memory is needed.", "the block manager", "a block manager", "the BlockManager", "BlockManager"),
    ask("The least recently used blocks that no request holds are evicted first. Blocks in use are never evicted.",
        "Which cached blocks are evicted first?", "How are cached blocks evicted?", "How does eviction work?",
        "What is LRU eviction?", "Which blocks are evicted first?", "When are cached blocks evicted?"),
    topic("It counts how many sequences use a block. Sequences with the same prefix share blocks, "
          "and a block can be reused only when its count is zero.",
          "the reference count of a block", "a reference count", "reference counting", "the reference count"),
    # Scheduling
    topic("Continuous batching lets requests join and leave the running batch at every step. "
          "A finished request makes room at once, so the hardware stays busy.",
          "continuous batching", also=["How does continuous batching work?"]),
    ask("A static batch waits for its longest request while the others are done. "
        "Continuous batching fills each free place at the next step.",
        "Why is continuous batching better than static batching?",
        "What is the difference between static and continuous batching?", "Why use continuous batching?",
        "What is the advantage of continuous batching?", "Why is static batching slow?",
        "Why is continuous batching faster than static batching?"),
    topic("Prefill is the first pass over a prompt: all its tokens are processed together and their keys and values are "
          "written to the KV cache.", "prefill", "the prefill phase", "prefilling"),
    topic("Decode is the phase that generates text: each step runs one new token per sequence against the KV cache.",
          "decode", "the decode phase", "decoding", "a decode step"),
    ask("Prefill handles many tokens at once and is limited by arithmetic. "
        "Decode handles one token per sequence and is limited by memory bandwidth.",
        "What is the difference between prefill and decode?", "How do prefill and decode differ?",
        "What is the difference between prefill and decoding?", "Compare prefill and decode.",
        "Prefill or decode: what is the difference?", "How is prefill different from decode?"),
    topic("Chunked prefill splits a long prompt into pieces that run in several steps beside the decodes of other requests, "
          "so a long prompt does not stall them.", "chunked prefill", "prefill chunking",
          also=["Why is prefill split into chunks?", "Why are long prompts split into chunks?"]),
    topic("The scheduler decides at each step which sequences run and how many tokens each gets, "
          "within a token budget and the free KV blocks.",
          "the scheduler", "a scheduler", "the Scheduler", also=["What does the scheduler do?"]),
    topic("The token budget is the most tokens that one step may process. Decodes and prefill chunks share it. "
          "The option is --max-num-batched-tokens.",
          "the token budget", "a token budget", "max_num_batched_tokens", "--max-num-batched-tokens"),
    topic("Preemption takes a running request off the batch when no KV block is free. "
          "Its blocks are released and it continues later, with the same result.",
          "preemption", also=["What happens when a request is preempted?", "Why are requests preempted?"]),
    ask("The newest running request is preempted: its blocks are freed for the others, and it is recomputed later.",
        "What happens when the KV cache is full?", "What happens when the KV cache runs out of blocks?",
        "What happens if there are no free blocks?", "What happens when memory for the KV cache runs out?",
        "What if the KV cache is full?", "Which request is preempted first?"),
    topic("A preempted request drops its blocks and later prefills its prompt and generated tokens again. "
          "This is simpler than copying the cache to host memory.",
          "preemption by recomputation", "recomputation", "recompute preemption"),
    # Prefix cache
    topic("Prefix caching keeps the KV blocks of earlier prompts. "
          "A new prompt that begins with the same tokens uses these blocks and skips that part of its prefill.",
          "prefix caching", "the prefix cache", "a prefix cache", "automatic prefix caching",
          also=["How does prefix caching work?"]),
    ask("Each full block has a hash of its tokens and of the hash of the block before it. "
        "Blocks are looked up by this chained hash from the start of the prompt.",
        "How does the prefix cache find a match?", "How are cached prefixes found?", "What is a chained hash?",
        "How does the prefix cache find blocks?", "How are blocks hashed?", "How does the prefix cache look up a prompt?"),
    ask("A hit is verified: the tokens of the block and its parent are compared, so a hash collision costs time "
        "but never gives a wrong result.",
        "What happens on a hash collision?", "What if two blocks have the same hash?",
        "Can a hash collision give a wrong result?", "Are hash collisions dangerous?", "What about hash collisions?"),
    ask("It helps when many prompts share a beginning, such as a system prompt, few-shot examples or an earlier conversation.",
        "When does prefix caching help?", "When is prefix caching useful?", "When should I use prefix caching?",
        "Why use prefix caching?", "What is prefix caching good for?", "Which workloads gain from prefix caching?"),
    # Speed
    topic("A CUDA graph is a recorded sequence of GPU kernels that is launched with one call. "
          "It removes the cost of launching each kernel.", "a CUDA graph", "CUDA graphs", "CUDA graph capture"),
    ask("A decode step runs many short kernels, and launching them one by one can take longer than running them. "
        "A graph launches them all with one call.",
        "Why do CUDA graphs make decoding faster?", "Why do CUDA graphs help decoding?", "Why are CUDA graphs useful?",
        "What is the advantage of CUDA graphs?", "Why use CUDA graphs?", "How do CUDA graphs speed up decoding?"),
    topic("The option --enforce-eager turns CUDA graphs off: each kernel is launched by itself. It is useful for debugging.",
          "--enforce-eager", "enforce_eager", "eager mode", "the option --enforce-eager",
          also=["How do I turn off CUDA graphs?", "How can I disable CUDA graphs?"]),
    topic("Tensor parallelism splits the weights of each layer over several GPUs. Each computes its part, "
          "and an all-reduce adds the parts together.",
          "tensor parallelism", "tensor parallel inference", also=["How does tensor parallelism work?"]),
    topic("An all-reduce sums a tensor over all ranks and gives every rank the result. "
          "Tensor parallelism needs two per layer: after attention and after the MLP.",
          "an all-reduce", "all-reduce", "all_reduce", "the all-reduce"),
    ask("A column-parallel layer splits the outputs and needs no communication. "
        "A row-parallel layer splits the inputs and ends with an all-reduce.",
        "What is the difference between column-parallel and row-parallel layers?",
        "What is a column-parallel layer?", "What is a row-parallel layer?",
        "What are column-parallel and row-parallel layers?", "How do column and row parallel layers differ?",
        "What is ColumnParallelLinear?", "What is RowParallelLinear?"),
    ask("Each decode step reads all weights once, whatever the batch size. "
        "So the memory bandwidth sets the speed, and larger batches are almost free.",
        "Why is decoding limited by memory bandwidth?", "Why is decode memory-bound?",
        "What limits the speed of decoding?", "Why is decoding memory bound?", "Why are larger batches almost free?",
        "Why does batching make decoding faster?"),
    ask("Throughput is how many tokens per second all requests get together. "
        "Latency is how long one request waits for its tokens.",
        "What is the difference between throughput and latency?", "What is throughput?", "What is latency?",
        "How do throughput and latency differ?", "Compare throughput and latency."),
    topic("It is the time from a request's arrival to its first token. Queueing and prefill make up most of it.",
          "the time to first token", "time to first token", "TTFT"),
    # Sampling
    topic("Temperature divides the logits before sampling. Low values make the text more certain, high values more varied, "
          "and 0 means greedy decoding.", "temperature", "the temperature", "the sampling temperature",
          also=["What does temperature do?", "What does the temperature parameter do?"]),
    topic("Greedy decoding always takes the likeliest token. Set the temperature to 0 to get it.",
          "greedy decoding", "greedy sampling", "greedy search", also=["How do I get greedy decoding?"]),
    topic("top_p keeps the smallest set of likeliest tokens whose probabilities add up to p, and samples only from them.",
          "top_p", "top-p", "nucleus sampling", "top-p sampling", also=["What does top_p do?"]),
    topic("top_k keeps only the k likeliest tokens and samples from them.",
          "top_k", "top-k", "top-k sampling", also=["What does top_k do?"]),
    topic("min_p drops every token whose probability is less than p times that of the likeliest token.",
          "min_p", "min-p", "min-p sampling", also=["What does min_p do?"]),
    topic("The seed fixes the random numbers of a request. The same request with the same seed gives the same tokens, "
          "alone or in any batch.", "the seed", "a seed", "seed", also=["What does the seed do?", "Why set a seed?"]),
    topic("max_tokens is the most tokens that a request may generate. It then ends with the finish reason length.",
          "max_tokens", "--max-tokens", "the option max_tokens", also=["What does max_tokens do?"]),
    topic("A stop string ends a request as soon as it appears in the generated text. The text is cut before it.",
          "a stop string", "stop strings", "the stop parameter", also=["How do stop strings work?"]),
    topic("logprobs asks for the log-probabilities of each generated token and of its k likeliest alternatives.",
          "logprobs", "the logprobs parameter", also=["What does logprobs do?", "How do I get log-probabilities?"]),
    topic("ignore_eos lets a request go on after the end-of-sequence token, up to max_tokens. It is meant for benchmarks.",
          "ignore_eos", "the option ignore_eos", also=["What does ignore_eos do?"]),
    topic("The finish reason says why a request ended: stop, length, error or abort.",
          "a finish reason", "the finish reason", "finish_reason", also=["Which finish reasons are there?"]),
    topic("In speculative decoding a small model proposes several tokens, and the large model checks all of them in one pass.",
          "speculative decoding", "speculative sampling"),
    topic("FlashAttention computes attention block by block in fast on-chip memory, without writing the score matrix to GPU memory.",
          "FlashAttention", "flash attention", "flash-attention"),
    topic("Quantization stores weights in fewer bits, for example 8 or 4, to save memory and bandwidth at a small loss of accuracy.",
          "quantization", "weight quantization"),
    topic("It sets how many GPUs share one model. The default is 1.",
          "--tensor-parallel-size", "tensor_parallel_size", "the tensor parallel size"),
    # Models
    topic("A tokenizer turns text into token ids and token ids back into text.",
          "a tokenizer", "the tokenizer", "tokenization", also=["What does a tokenizer do?"]),
    topic("Byte-level BPE starts from single bytes and merges frequent neighbours into longer tokens, "
          "so it can encode any text.", "byte-level BPE", "byte-level byte pair encoding", "BPE", "byte pair encoding"),
    topic("A chat template turns a list of messages into the one prompt text that the model was trained on.",
          "a chat template", "the chat template", "ChatML", also=["What is a chat template for?"]),
    topic("RoPE encodes a token's position by rotating its queries and keys, so attention sees relative distances.",
          "RoPE", "rotary position embedding", "the rotary embedding", "a rotary embedding"),
    topic("RMSNorm divides each vector by its root mean square and multiplies it by a learned weight.",
          "RMSNorm", "RMS norm", "RMS normalization"),
    topic("In grouped-query attention several query heads share one key and value head, which makes the KV cache smaller.",
          "grouped-query attention", "GQA", "grouped query attention"),
    topic("Attention lets each token look at the earlier ones: its query is compared with their keys, "
          "and the result is a weighted sum of their values.", "attention", "self-attention", "causal attention"),
    topic("safetensors is a file format for weights: a small JSON header, then the raw tensors. "
          "It is safe to read and can be mapped into memory.", "safetensors", "the safetensors format", "a safetensors file"),
    topic("bfloat16 is a 16-bit number with the exponent range of float32 and 8 bits of precision. "
          "It halves the memory of the weights.", "bfloat16", "bf16", "the bf16 format"),
    # This engine
    topic("nano-vllm.cpp is an LLM inference engine in C++ and CUDA with paged attention, continuous batching and "
          "prefix caching. It needs no Python.", "nano-vllm.cpp", "nanovllm", "this engine", "the nano-vllm.cpp engine",
          also=["Which engine is this?", "What is this program?", "What program is this?"]),
    topic("nano-vLLM is a small LLM engine in Python that shows how vLLM works. nano-vllm.cpp is the same system in "
          "C++ and CUDA.", "nano-vllm", "nano-vLLM", "the nano-vLLM project"),
    topic("vLLM is a widely used LLM inference engine. It introduced paged attention.", "vLLM", "the vLLM project"),
    ask("Use nanovllm generate MODEL --prompt \"your text\". With --temperature 0 the output is greedy.",
        "How do I generate text?", "How can I generate text?", "How do I run a prompt?", "How do I generate text with nanovllm?",
        "What does nanovllm generate do?", "Which command generates text?", "How do I use nanovllm?",
        "How do I run nanovllm?", "How do I generate text with this engine?"),
    ask("Put one JSON object per line into a file and run nanovllm generate MODEL --input prompts.jsonl --output "
        "answers.jsonl.",
        "How do I run many prompts?", "How do I run many prompts from a file?", "How can I process a file of prompts?",
        "How do I use a JSON lines file?", "How do I run a batch of prompts?", "Can I read prompts from a file?",
        "How do I run prompts from a file?"),
    ask("Use nanovllm bench: it measures throughput, latency, prefill and startup of a model.",
        "How do I run a benchmark?", "How do I measure the speed?", "What does nanovllm bench do?",
        "How can I benchmark a model?", "Which command runs a benchmark?", "How do I measure throughput?",
        "How do I benchmark this engine?"),
    ask("Use nanovllm tokenize MODEL: it shows the token ids of a text.",
        "How do I see the tokens of a text?", "What does nanovllm tokenize do?", "How do I tokenize text?",
        "How can I tokenize a text?", "Which command shows token ids?", "How do I see token ids?",
        "How do I count the tokens of a text?"),
    ask("Use nanovllm inspect MODEL: it prints the architecture, the number of parameters and the memory plan.",
        "How do I inspect a model?", "What does nanovllm inspect do?", "How do I see the memory plan?",
        "How much memory will a model need?", "Which command shows the memory plan?", "How can I inspect a model?",
        "How do I see how many parameters a model has?"),
    ask("The commands are nanovllm generate, nanovllm bench, nanovllm tokenize and nanovllm inspect.",
        "Which commands does nanovllm have?", "What commands are there?", "Which commands are there?",
        "What are the commands of nanovllm?", "List the commands.", "What can nanovllm do?"),
    ask("No. The engine runs on the CPU too, and chooses the GPU when it finds one.",
        "Do I need a GPU?", "Does it need a GPU?", "Can it run without a GPU?", "Does nano-vllm.cpp run on the CPU?",
        "Do I need a GPU to run nano-vllm.cpp?", "Can I run this engine on a CPU?", "Is a GPU required?"),
    ask("No. It is one C++ program that reads a Hugging Face model directory by itself.",
        "Does nano-vllm.cpp need Python?", "Do I need Python?", "Is Python required?", "Does it need PyTorch?",
        "Do I have to install Python?", "Do I need PyTorch?"),
    ask("It runs dense Qwen3 models from a Hugging Face directory. An unknown architecture is refused by name.",
        "Which models can I run?", "Which models does nano-vllm.cpp support?", "What models are supported?",
        "Which models are supported?", "Can I run Qwen3?", "What models can this engine run?"),
    ask("Yes. The order of every sum is fixed, so a request gives the same tokens alone, in any batch, "
        "after preemption and on a prefix hit.",
        "Does a request give the same result in any batch?", "Are the results reproducible?",
        "Are results the same in every batch?", "Is the output deterministic?", "Does the batch change the result?",
        "Does the result depend on the batch?"),
    topic("It is the share of the GPU's memory that weights, workspace and KV cache may use together. The default is 0.9.",
          "--gpu-memory-utilization", "gpu_memory_utilization", "GPU memory utilization"),
    topic("It is the most tokens that a prompt and its output may have together. A longer request is refused.",
          "--max-model-len", "max_model_len", "the maximum model length"),
]


def training_wordings(question: Question) -> list[str]:
    return question.wordings + [w.format(t=t) for t in question.topics for w in TOPIC_WORDINGS]


def unseen_wordings(question: Question) -> list[str]:
    seen = set(training_wordings(question))
    return [w for t in question.topics for w in (u.format(t=t) for u in UNSEEN_TOPIC_WORDINGS) if w not in seen]


def roughen(rng: Random, text: str) -> str:
    """The same question as people type it: other case, no question mark, a polite frame."""
    if rng.random() < 0.5:
        return text
    if rng.random() < 0.4:
        text = text[0].lower() + text[1:] if not text[:2].isupper() else text
    if rng.random() < 0.15:
        text = text.lower()
    if rng.random() < 0.3:
        text = text.rstrip("?.")
    if rng.random() < 0.2:
        text = rng.choice(["Please tell me: ", "Hi! ", "Hello, ", "Quick question: ", "Question: ", "So, ", "Ok, ", "And "]) + text
    if rng.random() < 0.1:
        text += rng.choice([" Please answer briefly.", " Thanks!", " Thank you.", " Please.", " Be brief."])
    return text


def random_question(rng: Random) -> tuple[str, str]:
    question = rng.choice(QUESTIONS)
    wordings = question.wordings
    if question.topics and rng.random() < 0.6:
        # The first topic is the one people use most.
        t = question.topics[0] if rng.random() < 0.4 else rng.choice(question.topics)
        wordings = [rng.choice(TOPIC_WORDINGS).format(t=t)]
    text = rng.choice(wordings) if rng.random() < 0.8 else question.canonical
    text = text[0].upper() + text[1:] if text[0] != "-" and rng.random() < 0.5 else text
    return roughen(rng, text), question.answer
