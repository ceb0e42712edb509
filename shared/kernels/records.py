"""The C records of the compiled kernels (``native/*.h``), field by field. Owns no memory."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from typing import ClassVar

_Fields = list[tuple[str, type]]


#: Kinds of a matrix's elements.
FLOAT32, BFLOAT16, INT8 = 0, 1, 2


class Matrix(Structure):
    _fields_: ClassVar[_Fields] = [
        ("data", c_void_p),
        ("bias", c_void_p),
        ("scales", c_void_p),
        ("n", c_int32),
        ("k", c_int32),
        ("kind", c_int32),
        ("reserved", c_int32),
    ]


class KVGroup(Structure):
    _fields_: ClassVar[_Fields] = [
        ("data", c_void_p),
        ("block_stride", c_int64),
        ("head_stride", c_int64),
        ("tables", c_void_p),
        ("table_stride", c_int64),
        ("block_size", c_int32),
        ("window", c_int32),
    ]


class Batch(Structure):
    _fields_: ClassVar[_Fields] = [
        ("rows", c_void_p),
        ("positions", c_void_p),
        ("tiles", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("num_tokens", c_int32),
        ("num_tiles", c_int32),
    ]


class Heads(Structure):
    _fields_: ClassVar[_Fields] = [
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("dim", c_int32),
        ("scale", c_float),
        ("eps", c_float),
    ]


class Layer(Structure):
    _fields_: ClassVar[_Fields] = [
        ("qkv", Matrix),
        ("o", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
        ("attn_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("group", c_int32),
        ("index", c_int32),
    ]


class Model(Structure):
    _fields_: ClassVar[_Fields] = [
        ("layers", POINTER(Layer)),
        ("groups", POINTER(KVGroup)),
        ("heads", Heads),
        ("num_layers", c_int32),
        ("hidden", c_int32),
    ]


class Workspace(Structure):
    _fields_: ClassVar[_Fields] = [
        ("normed", c_void_p),
        ("qkv", c_void_p),
        ("mixed", c_void_p),
        ("gate_up", c_void_p),
        ("gated", c_void_p),
    ]
