from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TensorHeader(_message.Message):
    __slots__ = ("dtype", "shape")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class Echo(_message.Message):
    __slots__ = ("chunk", "uplink")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    UPLINK_FIELD_NUMBER: _ClassVar[int]
    chunk: bytes
    uplink: float
    def __init__(self, chunk: _Optional[bytes] = ..., uplink: _Optional[float] = ...) -> None: ...

class FromDevice(_message.Message):
    __slots__ = ("hello", "ready", "activations", "chunk", "delivered", "failure")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    ACTIVATIONS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    DELIVERED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    ready: Ready
    activations: Activations
    chunk: bytes
    delivered: Delivered
    failure: Failure
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., activations: _Optional[_Union[Activations, _Mapping]] = ..., chunk: _Optional[bytes] = ..., delivered: _Optional[_Union[Delivered, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class ToDevice(_message.Message):
    __slots__ = ("welcome", "plan", "gradients", "chunk", "skip", "deliver", "stop", "evaluate", "evaluated")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    GRADIENTS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    SKIP_FIELD_NUMBER: _ClassVar[int]
    DELIVER_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    EVALUATE_FIELD_NUMBER: _ClassVar[int]
    EVALUATED_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    plan: Plan
    gradients: Gradients
    chunk: bytes
    skip: Skip
    deliver: Deliver
    stop: Stop
    evaluate: Evaluate
    evaluated: Evaluated
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., plan: _Optional[_Union[Plan, _Mapping]] = ..., gradients: _Optional[_Union[Gradients, _Mapping]] = ..., chunk: _Optional[bytes] = ..., skip: _Optional[_Union[Skip, _Mapping]] = ..., deliver: _Optional[_Union[Deliver, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ..., evaluate: _Optional[_Union[Evaluate, _Mapping]] = ..., evaluated: _Optional[_Union[Evaluated, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("device", "attempt", "version")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    device: str
    attempt: int
    version: int
    def __init__(self, device: _Optional[str] = ..., attempt: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("number", "settings")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    number: int
    settings: str
    def __init__(self, number: _Optional[int] = ..., settings: _Optional[str] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("samples", "forward_s", "backward_s", "rates", "fixed_s")
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    FORWARD_S_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_S_FIELD_NUMBER: _ClassVar[int]
    RATES_FIELD_NUMBER: _ClassVar[int]
    FIXED_S_FIELD_NUMBER: _ClassVar[int]
    samples: int
    forward_s: _containers.RepeatedScalarFieldContainer[float]
    backward_s: _containers.RepeatedScalarFieldContainer[float]
    rates: Rates
    fixed_s: float
    def __init__(self, samples: _Optional[int] = ..., forward_s: _Optional[_Iterable[float]] = ..., backward_s: _Optional[_Iterable[float]] = ..., rates: _Optional[_Union[Rates, _Mapping]] = ..., fixed_s: _Optional[float] = ...) -> None: ...

class Rates(_message.Message):
    __slots__ = ("uplink", "downlink", "fed_uplink", "fed_downlink", "uplink_s", "downlink_s", "fed_uplink_s", "fed_downlink_s")
    UPLINK_FIELD_NUMBER: _ClassVar[int]
    DOWNLINK_FIELD_NUMBER: _ClassVar[int]
    FED_UPLINK_FIELD_NUMBER: _ClassVar[int]
    FED_DOWNLINK_FIELD_NUMBER: _ClassVar[int]
    UPLINK_S_FIELD_NUMBER: _ClassVar[int]
    DOWNLINK_S_FIELD_NUMBER: _ClassVar[int]
    FED_UPLINK_S_FIELD_NUMBER: _ClassVar[int]
    FED_DOWNLINK_S_FIELD_NUMBER: _ClassVar[int]
    uplink: float
    downlink: float
    fed_uplink: float
    fed_downlink: float
    uplink_s: float
    downlink_s: float
    fed_uplink_s: float
    fed_downlink_s: float
    def __init__(self, uplink: _Optional[float] = ..., downlink: _Optional[float] = ..., fed_uplink: _Optional[float] = ..., fed_downlink: _Optional[float] = ..., uplink_s: _Optional[float] = ..., downlink_s: _Optional[float] = ..., fed_uplink_s: _Optional[float] = ..., fed_downlink_s: _Optional[float] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("attempt", "block", "next_round", "last_round", "cut", "evaluate", "estimate", "micro_batches", "wire_dtype", "exact_round")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    NEXT_ROUND_FIELD_NUMBER: _ClassVar[int]
    LAST_ROUND_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    EVALUATE_FIELD_NUMBER: _ClassVar[int]
    ESTIMATE_FIELD_NUMBER: _ClassVar[int]
    MICRO_BATCHES_FIELD_NUMBER: _ClassVar[int]
    WIRE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    EXACT_ROUND_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    block: int
    next_round: int
    last_round: int
    cut: int
    evaluate: bool
    estimate: int
    micro_batches: int
    wire_dtype: str
    exact_round: int
    def __init__(self, attempt: _Optional[int] = ..., block: _Optional[int] = ..., next_round: _Optional[int] = ..., last_round: _Optional[int] = ..., cut: _Optional[int] = ..., evaluate: _Optional[bool] = ..., estimate: _Optional[int] = ..., micro_batches: _Optional[int] = ..., wire_dtype: _Optional[str] = ..., exact_round: _Optional[int] = ...) -> None: ...

class Activations(_message.Message):
    __slots__ = ("attempt", "round", "evaluation", "labels", "tensor", "forward_s", "backward_s", "downlink", "evaluation_batches", "estimation", "fetch_s", "part", "update_s")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    FORWARD_S_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_S_FIELD_NUMBER: _ClassVar[int]
    DOWNLINK_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_BATCHES_FIELD_NUMBER: _ClassVar[int]
    ESTIMATION_FIELD_NUMBER: _ClassVar[int]
    FETCH_S_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    UPDATE_S_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    round: int
    evaluation: bool
    labels: TensorHeader
    tensor: TensorHeader
    forward_s: float
    backward_s: float
    downlink: float
    evaluation_batches: int
    estimation: bool
    fetch_s: float
    part: int
    update_s: float
    def __init__(self, attempt: _Optional[int] = ..., round: _Optional[int] = ..., evaluation: _Optional[bool] = ..., labels: _Optional[_Union[TensorHeader, _Mapping]] = ..., tensor: _Optional[_Union[TensorHeader, _Mapping]] = ..., forward_s: _Optional[float] = ..., backward_s: _Optional[float] = ..., downlink: _Optional[float] = ..., evaluation_batches: _Optional[int] = ..., estimation: _Optional[bool] = ..., fetch_s: _Optional[float] = ..., part: _Optional[int] = ..., update_s: _Optional[float] = ...) -> None: ...

class Gradients(_message.Message):
    __slots__ = ("round", "tensor", "part")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    round: int
    tensor: TensorHeader
    part: int
    def __init__(self, round: _Optional[int] = ..., tensor: _Optional[_Union[TensorHeader, _Mapping]] = ..., part: _Optional[int] = ...) -> None: ...

class Skip(_message.Message):
    __slots__ = ("next_round",)
    NEXT_ROUND_FIELD_NUMBER: _ClassVar[int]
    next_round: int
    def __init__(self, next_round: _Optional[int] = ...) -> None: ...

class Evaluate(_message.Message):
    __slots__ = ("attempt",)
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    def __init__(self, attempt: _Optional[int] = ...) -> None: ...

class Evaluated(_message.Message):
    __slots__ = ("attempt", "number")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    number: int
    def __init__(self, attempt: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class Deliver(_message.Message):
    __slots__ = ("attempt",)
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    def __init__(self, attempt: _Optional[int] = ...) -> None: ...

class Delivered(_message.Message):
    __slots__ = ("attempt", "fed_uplink", "fed_downlink", "backward_s", "upload_s", "update_s")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FED_UPLINK_FIELD_NUMBER: _ClassVar[int]
    FED_DOWNLINK_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_S_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_S_FIELD_NUMBER: _ClassVar[int]
    UPDATE_S_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    fed_uplink: float
    fed_downlink: float
    backward_s: float
    upload_s: float
    update_s: float
    def __init__(self, attempt: _Optional[int] = ..., fed_uplink: _Optional[float] = ..., fed_downlink: _Optional[float] = ..., backward_s: _Optional[float] = ..., upload_s: _Optional[float] = ..., update_s: _Optional[float] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("reason", "diverged")
    REASON_FIELD_NUMBER: _ClassVar[int]
    DIVERGED_FIELD_NUMBER: _ClassVar[int]
    reason: str
    diverged: bool
    def __init__(self, reason: _Optional[str] = ..., diverged: _Optional[bool] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ("reason", "done")
    REASON_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    done: bool
    def __init__(self, reason: _Optional[str] = ..., done: _Optional[bool] = ...) -> None: ...

class Layers(_message.Message):
    __slots__ = ("attempt", "device", "first", "last", "size")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    device: str
    first: int
    last: int
    size: int
    def __init__(self, attempt: _Optional[int] = ..., device: _Optional[str] = ..., first: _Optional[int] = ..., last: _Optional[int] = ..., size: _Optional[int] = ...) -> None: ...

class LayersPart(_message.Message):
    __slots__ = ("header", "chunk", "opening", "final")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    OPENING_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    header: Layers
    chunk: bytes
    opening: Opening
    final: Final
    def __init__(self, header: _Optional[_Union[Layers, _Mapping]] = ..., chunk: _Optional[bytes] = ..., opening: _Optional[_Union[Opening, _Mapping]] = ..., final: _Optional[_Union[Final, _Mapping]] = ...) -> None: ...

class Opening(_message.Message):
    __slots__ = ("attempt", "version", "deepest", "cuts")
    class CutsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DEEPEST_FIELD_NUMBER: _ClassVar[int]
    CUTS_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    version: int
    deepest: int
    cuts: _containers.ScalarMap[str, int]
    def __init__(self, attempt: _Optional[int] = ..., version: _Optional[int] = ..., deepest: _Optional[int] = ..., cuts: _Optional[_Mapping[str, int]] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("anew",)
    ANEW_FIELD_NUMBER: _ClassVar[int]
    anew: bool
    def __init__(self, anew: _Optional[bool] = ...) -> None: ...

class Wanted(_message.Message):
    __slots__ = ("attempt", "first", "last")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    first: int
    last: int
    def __init__(self, attempt: _Optional[int] = ..., first: _Optional[int] = ..., last: _Optional[int] = ...) -> None: ...

class Received(_message.Message):
    __slots__ = ("size",)
    SIZE_FIELD_NUMBER: _ClassVar[int]
    size: int
    def __init__(self, size: _Optional[int] = ...) -> None: ...

class Closing(_message.Message):
    __slots__ = ("attempt", "weights", "divergence")
    class WeightsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    DIVERGENCE_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    weights: _containers.ScalarMap[str, float]
    divergence: bool
    def __init__(self, attempt: _Optional[int] = ..., weights: _Optional[_Mapping[str, float]] = ..., divergence: _Optional[bool] = ...) -> None: ...

class Closed(_message.Message):
    __slots__ = ("version", "missing", "divergence")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    DIVERGENCE_FIELD_NUMBER: _ClassVar[int]
    version: int
    missing: _containers.RepeatedScalarFieldContainer[str]
    divergence: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, version: _Optional[int] = ..., missing: _Optional[_Iterable[str]] = ..., divergence: _Optional[_Iterable[float]] = ...) -> None: ...

class Merging(_message.Message):
    __slots__ = ("attempt", "weights")
    class WeightsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    weights: _containers.ScalarMap[str, float]
    def __init__(self, attempt: _Optional[int] = ..., weights: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Merged(_message.Message):
    __slots__ = ("missing",)
    MISSING_FIELD_NUMBER: _ClassVar[int]
    missing: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, missing: _Optional[_Iterable[str]] = ...) -> None: ...

class Final(_message.Message):
    __slots__ = ("version", "statistics")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATISTICS_FIELD_NUMBER: _ClassVar[int]
    version: int
    statistics: bool
    def __init__(self, version: _Optional[int] = ..., statistics: _Optional[bool] = ...) -> None: ...
