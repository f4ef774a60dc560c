"""Numbers and layouts of quantised weights, written from their descriptions with numpy: compressed-tensors' pack-quantized,
float-quantized and int-quantized, GPTQ (both formats), AutoAWQ's gemm, and fp8 in blocks. A writer puts a weight's tensors into a File
and returns the float32 numbers that they stand for."""
import json
import struct

import numpy as np


# -- Numbers ---------------------------------------------------------------------------------------------------------------------
def to_bf16(x):
    """The nearest bf16, ties to even, as bits."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)


def as_bf16(x):
    return (to_bf16(x).astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def e4m3_table():
    bits = np.arange(256)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    value = np.where(bits & 128, -value, value)
    value[[127, 255]] = np.nan
    return value


E4M3 = e4m3_table()


def to_e4m3(x):
    """Bits of a nearest E4M3 number."""
    numbers = np.where(np.isnan(E4M3), np.inf, E4M3)
    return np.abs(x.reshape(-1, 1) - numbers).argmin(1).astype(np.uint8).reshape(x.shape)


def quantised_rows(x, kind, per, scale):
    """x as its numbers and scales have it: each row, or 128 columns of it, by its largest magnitude, or all by `scale`."""
    x = np.asarray(x, np.float32)
    if per == "group":
        return np.concatenate([quantised_rows(part, kind, "token", None) for part in np.split(x, x.shape[-1] // 128, -1)], -1)
    most = np.float32(448 if kind == "F8_E4M3" else 127)
    s = np.float32(scale) if per == "tensor" else np.maximum(np.abs(x).max(-1, keepdims=True), np.float32(2.0**-100)) / most
    q = (x / s).astype(np.float64)
    step = 1.0
    if kind == "F8_E4M3":  # three bits behind the leading one; those of 2^-6 below that
        step = 2.0 ** (np.maximum(np.floor(np.log2(np.maximum(np.abs(q), 2.0**-20))), -6) - 3)
    return np.clip(np.round(q / step) * step, -most, most) * s.astype(np.float64)


def fnv(data):
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return f"{value:016x}"


class File:
    """A safetensors file, and the weights that it stands for."""

    def __init__(self):
        self.tensors = {}
        self.rows = {}  # module -> how rows that meet it are quantised: (kind, per, scale)

    def put(self, name, array, dtype):
        kinds = dict(F32=np.float32, F16=np.float16, I32=np.int32, I64=np.int64, I8=np.int8)
        if dtype == "BF16":
            array = to_bf16(array)
        elif dtype in kinds:
            array = array.astype(kinds[dtype])
        self.tensors[name] = (dtype, list(array.shape), np.ascontiguousarray(array).tobytes())

    def write(self, path):
        header, at = {}, 0
        for name, (dtype, shape, data) in self.tensors.items():
            header[name] = dict(dtype=dtype, shape=shape, data_offsets=[at, at + len(data)])
            at += len(data)
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in self.tensors.values()))


def stored(scale, dtype):
    """What is read back of a scale."""
    if dtype == "BF16":
        return as_bf16(scale)
    return scale.astype(np.float16 if dtype == "F16" else np.float32).astype(np.float64)


def scaled(scale, difference):
    """The definition: a product in float32."""
    return scale.astype(np.float32) * difference.astype(np.float32)


# -- Layouts ---------------------------------------------------------------------------------------------------------------------
def pack(values, bits, axis, order=None):
    """Unsigned integers, 32 / bits of them along `axis` to an int32, the first in the lowest bits; or in the places `order` names."""
    count = 32 // bits
    values = np.moveaxis(values, axis, -1).astype(np.uint64)
    missing = -values.shape[-1] % count
    values = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, missing)])
    values = values.reshape(*values.shape[:-1], -1, count)
    words = sum(values[..., j] << np.uint64(bits * place) for place, j in enumerate(order or range(count)))
    return np.moveaxis(words.astype(np.uint32).view(np.int32), -1, axis)


def quantise_groups(w, bits, group, symmetric, dtype, columns):
    """(integers [n, k], scales and zeros [n, groups], the group of each column): integers from 0, zeros within them."""
    n, k = w.shape
    group = k if group == -1 else group
    index = np.empty(k, np.int64)
    index[columns] = np.arange(k) // group
    scales, zeros = np.empty((n, k // group)), np.empty((n, k // group))
    most = 2**bits - 1
    for g in range(k // group):
        part = w[:, index == g]
        if symmetric:
            scales[:, g], zeros[:, g] = np.abs(part).max(1) / (most // 2), 2 ** (bits - 1)
        else:
            low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            scales[:, g] = (high - low) / most
            zeros[:, g] = np.clip(np.round(-low / scales[:, g]), 1, most - 1)
    scales = stored(scales, dtype)
    q = np.clip(np.round(w / scales[:, index]) + zeros[:, index], 0, most)
    return q, scales, zeros, index


def packed(file, name, w, rng, bits=4, group=32, symmetric=True, ordered=False, dtype="BF16", rows=None, as_bytes=False):
    n, k = w.shape
    q, scales, zeros, index = quantise_groups(w, bits, group, symmetric, dtype, rng.permutation(k) if ordered else np.arange(k))
    if rows:
        file.rows[name] = ("I8", rows, None)
    if as_bytes:  # int-quantized
        file.put(name + ".weight", q - zeros[:, index], "I8")
        file.put(name + ".weight_scale", scales, dtype)
        return scaled(scales[:, index], q - zeros[:, index])
    file.put(name + ".weight_packed", pack(q, bits, 1), "I32")
    file.put(name + ".weight_scale", scales, dtype)
    file.put(name + ".weight_shape", np.array([n, k]), "I64")
    if not symmetric:
        file.put(name + ".weight_zero_point", pack(zeros, bits, 0), "I32")
    if ordered:
        file.put(name + ".weight_g_idx", index, "I32")
    return scaled(scales[:, index], q - zeros[:, index])


def gptq(file, name, w, rng, bits=4, group=128, symmetric=True, ordered=False, version=1):
    n, k = w.shape
    q, scales, zeros, index = quantise_groups(w, bits, group, symmetric, "F16", rng.permutation(k) if ordered else np.arange(k))
    file.put(name + ".qweight", pack(q.T, bits, 0), "I32")
    file.put(name + ".qzeros", pack(zeros.T - (1 if version == 1 else 0), bits, 1), "I32")
    file.put(name + ".scales", scales.T, "F16")
    file.put(name + ".g_idx", index, "I32")
    return scaled(scales[:, index], q - zeros[:, index])


def awq(file, name, w, rng, group=64):
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    q, scales, zeros, index = quantise_groups(w, 4, group, False, "F16", np.arange(w.shape[1]))
    file.put(name + ".qweight", pack(q.T, 4, 1, order), "I32")
    file.put(name + ".qzeros", pack(zeros.T, 4, 1, order), "I32")
    file.put(name + ".scales", scales.T, "F16")
    return scaled(scales[:, index], q - zeros[:, index])


def bytes_of(file, name, w, rng, kind="F8_E4M3", per="channel", dtype="F32", rows=None):
    most = 448.0 if kind == "F8_E4M3" else 127.0
    n, k = w.shape
    if per == "block":
        blocks = -(-n // 128), -(-k // 128)
        scales = np.array([[np.abs(w[i * 128 : i * 128 + 128, j * 128 : j * 128 + 128]).max() for j in range(blocks[1])]
                           for i in range(blocks[0])]) / most
        scales = stored(scales, dtype)
        file.put(name + ".weight_scale_inv", scales, dtype)
        whole = np.repeat(np.repeat(scales, 128, 0), 128, 1)[:n, :k]
    elif per == "channel":
        scales = stored(np.abs(w).max(1, keepdims=True) / most, dtype)
        file.put(name + ".weight_scale", scales, dtype)
        whole = np.broadcast_to(scales, w.shape)
    else:
        scales = stored(np.array([np.abs(w).max() / most]), dtype)
        file.put(name + ".weight_scale", scales, dtype)
        whole = np.broadcast_to(scales, w.shape)
    scale = None
    if rows == "tensor":
        scale = stored(np.array([0.02 + 0.01 * rng.random()]), "F32")
        file.put(name + ".input_scale", scale, "F32")
    if rows:
        file.rows[name] = (kind, rows, scale)
    if kind == "F8_E4M3":
        q = to_e4m3(w / whole)
        file.tensors[name + ".weight"] = (kind, [n, k], q.tobytes())
        return scaled(whole, E4M3[q])
    q = np.clip(np.round(w / whole), -127, 127) + 0.0  # integers have no zero below 0
    file.put(name + ".weight", q, "I8")
    return scaled(whole, q)
