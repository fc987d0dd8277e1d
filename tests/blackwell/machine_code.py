"""Rules over the PTX and machine code of the Blackwell kernels.

`violations` names the rules that do not hold.  Addresses of barriers and other operands are
evaluated for each rank of a cluster, as far as they are constants.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator

from cutefce.cute_kernels.arch import arch_named
from cutefce.cute_kernels.arch.base import TILE_K
from cutefce.cute_kernels.arch.sm100 import Sm100
from cutefce.cute_kernels.spec.gemm import ProjectExpSpec

WAIT = re.compile(r"mbarrier\.try_wait\S* P1, \[(%r\d+)\]")
DEFINITION = re.compile(r"(\S+) (%\w+|\{[%\w, ]+\})(?:\|%p\d+)?, (.*);")
ARITHMETIC: dict[str, Callable[..., int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "shl": lambda a, b: a << b,
    "shr": lambda a, b: a >> b,
    "selp": lambda a, b, condition: a if condition else b,
    "setp.ne": lambda a, b: int(a != b),
    "setp.lt": lambda a, b: int(a < b),
}
FORMATS = {"float16": 0, "bfloat16": 1}
"""Codes of the operands' formats in an instruction descriptor."""
K_MAJOR = 1 << 16 | (1024 >> 4) << 32 | 1 << 46 | 2 << 61
"""A matrix descriptor without its address: swizzled rows of 128 bytes in groups of 8."""


class Code:
    """The instructions of one kernel, and its spec."""

    def __init__(self, ptx: str, kernel: ProjectExpSpec) -> None:
        self.kernel, self.config = kernel, kernel.config
        arch = arch_named(kernel.arch)
        assert isinstance(arch, Sm100)
        self.arch = arch
        body = ptx[ptx.index(".reqntid") :]
        lines = (line.strip().replace("\t", " ") for line in body.splitlines())
        self.lines = [re.sub(r"\s+", " ", line) for line in lines if line]
        self._matching: dict[str, list[int]] = {}
        self.mma_ctas, self.is_pair = self.config.cluster, self.config.cluster == 2
        stages = self.config.stages
        # barriers by offset: kind and arrivals
        kinds = (
            ("filled", stages, 1),
            ("drained", stages, 1),
            ("computed", arch.ACC_STAGES, 1),
            ("read", arch.ACC_STAGES, 4 * self.mma_ctas),
        )
        named = [(kind, count) for kind, number, count in kinds for _ in range(number)]
        self.barriers = {8 * i: barrier for i, barrier in enumerate(named)}

    def at(self, pattern: str, start: int = 0, stop: int | None = None) -> list[int]:
        """Return the lines that match, from `start` on."""
        found = self._matching.get(pattern)
        if found is None:
            search = re.compile(pattern).search
            found = [i for i, line in enumerate(self.lines) if search(line)]
            self._matching[pattern] = found
        last = len(found) if stop is None else bisect_left(found, stop)
        return found[bisect_left(found, start) : last]

    def definition(self, line: int, register: str) -> tuple[int, str, list[str]]:
        """Return the last definition before `line`: its line, operation and operands."""
        for i in range(line - 1, -1, -1):
            found = DEFINITION.match(self.lines[i])
            if not found or register not in (parts := found[2].strip("{}").split(", ")):
                continue
            operands = [part.strip("{} ") for part in found[3].split(",")]
            half = ("low", "high")[parts.index(register)] if len(parts) == 2 else found[1]
            return i, half, operands
        raise LookupError(register)

    def value(self, line: int, operand: str, rank: int = 0) -> int:
        """Return the value of an operand at `line` in block `rank`; it must be a constant there."""
        if operand == "%cluster_ctarank":
            return rank
        if not operand.startswith("%"):
            return int(operand, 0)
        i, operation, operands = self.definition(line, operand)
        if operation.split(".")[0] in ("mov", "cvt", "shfl"):
            return self.value(i, operands[0], rank)
        values = (self.value(i, each, rank) for each in operands)
        name = next(name for name in ARITHMETIC if operation.startswith(name))
        return ARITHMETIC[name](*values)

    def offset(self, line: int, operand: str) -> int:
        """Return the constant part of an address: that of the first barrier of its kind."""
        register, _, immediate = operand.strip("[]").partition("+")
        rest = int(immediate or 0)
        _, operation, operands = self.definition(line, register)
        if operation.startswith("mapa"):
            return rest + self.offset(line, operands[0])
        if operation.startswith("add") and not operands[1].startswith("%"):
            return rest + int(operands[1]) + self.offset(line, operands[0])
        return rest  # the rest depends on the stage

    def kind(self, line: int, operand: str) -> str:
        """Return the kind of the barrier at an address."""
        return self.barriers.get(self.offset(line, operand), ("none", 0))[0]

    def waits(self, kind: str) -> list[int]:
        """Return the lines of waits for barriers of a kind."""
        found = [(i, WAIT.search(self.lines[i])) for i in range(len(self.lines))]
        return [i for i, match in found if match and self.kind(i, match[1]) == kind]

    def next(self, line: int, pattern: str = r"^(?!//|\}|\$|\.|bra|@P1|DONE|LAB)\w") -> int:
        """Return the next line that matches, by default an instruction; past the end if none."""
        return next(iter(self.at(pattern, line + 1)), len(self.lines))

    def joins(self, line: int) -> bool:
        """Return whether the warp reconverges in the basic block before `line`."""
        begin = max(self.at(r"^\$|bra|^@", 0, line), default=0)
        return bool(self.at(r"^bar\.warp\.sync", begin, line))

    def comes(self, line: int, *patterns: str) -> bool:
        """Return whether instructions matching `patterns` follow `line` in this order."""
        for pattern in patterns:
            line = self.next(line, pattern)
        return line < len(self.lines)


Rule = Callable[[Code], Iterator[bool]]


def barriers(code: Code) -> Iterator[bool]:
    """Every barrier is initialized once, with the arrivals that it gets."""
    found = {}
    for i in code.at(r"^mbarrier\.init"):
        address, count = re.findall(r"\[(.*)\], (.*);", code.lines[i])[0]
        yield code.offset(i, address) not in found
        found[code.offset(i, address)] = code.value(i, count)
    yield found == {place: count for place, (_, count) in code.barriers.items()}


def setup(code: Code) -> Iterator[bool]:
    """Barriers and tensor memory are ready in the whole cluster before their first use."""
    last = code.at(r"^mbarrier\.init|^tcgen05\.(alloc|relinquish)")[-1]
    sync = sync_patterns(code)
    yield code.comes(
        last,
        r"^fence\.mbarrier_init",
        "before_thread_sync",
        *sync,
        "after_thread_sync",
        "ld.shared",
    )
    first_use = code.at(r"mbarrier\.(try_wait|arrive)|^ld\.shared|^tcgen05\.(mma|ld)")[0]
    yield first_use > code.next(last, sync[-1])


def tensor_memory(code: Code) -> Iterator[bool]:
    """Both accumulators are allocated, and freed after all blocks have arrived."""
    alloc, permit, dealloc = (
        code.at(rf"^tcgen05\.{name}\.cta_group::{code.mma_ctas}\.")
        for name in ("alloc", "relinquish_alloc_permit", "dealloc")
    )
    yield len(alloc) == len(permit) == len(dealloc) == len(code.at("^tcgen05.*alloc")) / 3 == 1
    yield code.joins(alloc[0]) and code.joins(dealloc[0])
    sizes = [re.findall(r", (%r\d+);", code.lines[i])[0] for i in (alloc[0], dealloc[0])]
    columns = [code.value(i, size) for i, size in zip((alloc[0], dealloc[0]), sizes, strict=True)]
    yield columns == 2 * [code.arch.used_tmem_columns(code.config)]
    last = max(code.at(r"try_wait|^tcgen05\.(ld|wait|mma|commit)|cp\.async"))
    yield code.comes(
        last, "before_thread_sync", *sync_patterns(code), "after_thread_sync", "dealloc"
    )


def sync_patterns(code: Code) -> tuple[str, ...]:
    """Return the instructions that synchronize all threads of a cluster."""
    cluster = (r"^barrier\.cluster\.arrive;", r"^barrier\.cluster\.wait;")
    return cluster if code.config.cluster > 1 else (r"^(bar|barrier)\.sync 0;",)


def loads(code: Code) -> Iterator[bool]:
    """A stage is filled after it was drained, with h and w, whose bytes are expected."""
    found = code.at(r"^cp\.async\.bulk\.tensor\.2d\.shared")
    yield len(found) == 2
    for i in found:
        line = code.lines[i]
        yield ("cta_group::2" in line) == code.is_pair
        yield "multicast::cluster" not in line
        barrier = re.findall(r"\[(%r\d+)\]", line)[0]
        if code.is_pair:  # the leader's barrier: its address without the rank bit
            _, operation, operands = code.definition(i, barrier)
            yield operation == "and.b32" and int(operands[1]) == -16777224
            barrier = operands[0]
        yield code.kind(i, barrier) == "filled"
    expect = code.at(r"^mbarrier\.arrive\.expect_tx")
    yield len(expect) == 1
    address, size = re.findall(r"\[(.*)\], (.*);", code.lines[expect[0]])[0]
    yield code.kind(expect[0], address) == "filled"
    yield code.value(expect[0], size) == code.mma_ctas * code.arch.stage_bytes(code.config)
    drained = code.waits("drained")
    # once before each fill, and once for every stage at the end
    yield len(drained) == 1 + code.config.stages
    yield drained[0] < expect[0] < found[0] < found[1] < drained[1]


def operands(code: Code) -> Iterator[bool]:
    """Each MMA reads 16-bit K-major operands of the tile's size and accumulates in float32."""
    products = code.at(r"^tcgen05\.mma")
    yield len(products) == TILE_K // 16
    for number, i in enumerate(products):
        line = code.lines[i]
        yield f".cta_group::{code.mma_ctas}.kind::f16" in line
        a, b, descriptor = re.findall(r"\], (%rd\d+), (%rd\d+), (%r\d+), \{", line)[0]
        bits = code.value(i, descriptor)
        kind = FORMATS[code.kernel.dtype]
        rows, columns = 128 * code.mma_ctas, code.config.tile_n
        yield bits == 1 << 4 | kind << 7 | kind << 10 | columns // 8 << 17 | rows // 16 << 24
        yield {code.value(i, lane) for lane in re.findall(r"%r\d+", line.split("{")[1])} == {0}
        enabled = re.findall(r"(%p\d+);", line)[0]
        _, _, (initial,) = code.definition(i, enabled)
        yield initial == ("0" if number == 0 else "-1")
        for matrix in (a, b):
            _, _, (low, high) = code.definition(i, matrix)
            yield code.offset(i, low) == 2 * number
            whole = code.definition(i, high)
            yield whole[1] == "high"
            _, operation, (_, constant) = code.definition(whole[0], whole[2][0])
            yield operation == "or.b64" and int(constant) == K_MAJOR


def products(code: Code) -> Iterator[bool]:
    """MMAs wait for an accumulator, then for each stage; commits release both in order."""
    (read,), (filled,) = code.waits("read"), code.waits("filled")
    issued, commits = code.at(r"^tcgen05\.mma"), code.at(r"^tcgen05\.commit")
    yield len(commits) == 2
    for wait in (read, filled):
        yield "fence::after_thread_sync" in code.lines[code.next(wait)]
    yield read < filled < issued[0] < issued[-1] < commits[0] < commits[1]
    for i, kind in zip(commits, ("drained", "computed"), strict=True):
        line = code.lines[i]
        address = re.findall(r"\[(\S+)\]", line)[0]
        yield f".cta_group::{code.mma_ctas}." in line and code.kind(i, address) == kind
        for rank in range(code.config.cluster):
            mask = re.findall(r", (%rs\d+);", line)
            got = code.value(i, mask[0], rank) if mask else 1
            yield got == (1 << code.config.cluster) - 1


def reads(code: Code) -> Iterator[bool]:
    """Logits are waited for before use and before the accumulator is released, once a warp."""
    (computed,) = code.waits("computed")
    (load,) = code.at(r"^tcgen05\.ld")
    yield "fence::after_thread_sync" in code.lines[code.next(computed)]
    yield computed < load
    yield code.joins(load)
    yield ".sync.aligned.32x32b.x64.b32" in code.lines[load]
    registers = set(re.findall(r"%r\d+", code.lines[load].split("}")[0]))
    waits = code.at(r"^tcgen05\.wait::ld\.sync\.aligned", load)
    yield len(waits) == 1
    # moves that pair registers are no uses: the assembler emits no instruction for them
    renamed = (r"^mov\.b64 %rd\d+, \{", r"^//")
    between = [
        line
        for line in code.lines[load + 1 : waits[0]]
        if not any(re.search(pattern, line) for pattern in renamed)
    ]
    yield not any(set(re.findall(r"%r\d+", line)) & registers for line in between)
    (release,) = code.at(r"^mbarrier\.arrive\.shared")
    yield code.comes(waits[0], "before_thread_sync", r"^elect\.sync", r"^mbarrier\.arrive\.shared")
    yield not code.at(r"^(tcgen05\.ld|elect)", release, code.next(release, r"^\$"))
    address, count = re.findall(r"\[(.*)\](?:, (%r\d+))?;", code.lines[release])[0]
    yield code.kind(release, address) == "read"
    yield not count or code.value(release, count) == 1
    is_remote = "shared::cluster" in code.lines[release]
    yield is_remote == code.is_pair
    if is_remote:
        _, _, (_, target) = code.definition(release, address)
        yield all(code.value(release, target, rank) == 0 for rank in range(2))


def stores(code: Code) -> Iterator[bool]:
    """An epilogue tile is written after TMA read its buffer, and stored after all lanes wrote."""
    found = code.at(r"^cp\.async\.bulk\.tensor\.2d\.global")
    yield len(found) == code.kernel.store
    if not found:
        return
    written = code.at(r"^st\.shared\.v4")
    yield len(written) == code.arch.EPI_TILE_COLUMNS // 8
    free = [i for i in code.at(r"^cp\.async\.bulk\.wait_group\.read 1;") if i < written[0]]
    yield bool(free) and code.comes(free[-1], r"^bar\.warp\.sync", r"^st\.shared")
    yield bool(free) and code.next(free[-1], r"^bar\.warp\.sync") < written[0]
    fence = code.next(written[-1], r"^fence\.proxy\.async\.shared::cta")
    yield fence < code.next(fence, r"^bar\.warp\.sync") < found[0]
    yield "commit_group" in code.lines[code.next(found[0])]
    yield code.comes(found[0], r"^cp\.async\.bulk\.wait_group\.read 0;", "dealloc")


def exponentials(code: Code) -> Iterator[bool]:
    """The hardware's unit computes as many exponentials as there are."""
    columns = code.arch.EPI_TILE_COLUMNS * (code.kernel.sums + code.kernel.store)
    # one more an epilogue tile rescales the row's sum, and one a column is its probability; beside
    # sums of all columns, one is the target's
    expected = columns + code.kernel.sums + code.kernel.reductions.of_all
    expected += code.arch.EPI_TILE_COLUMNS * code.kernel.samples
    capped = code.arch.EPI_TILE_COLUMNS if code.kernel.transform.softcap else 0
    yield len(code.at(r"^ex2\.approx\.ftz\.f32")) == expected + capped
    # one reciprocal a tanh, and that of κ if derivatives are stored
    inverses = capped > 0 and code.kernel.store
    yield len(code.at(r"^rcp\.approx\.ftz\.f32")) == capped + inverses


def registers(code: Code) -> Iterator[bool]:
    """Nothing is spilled to local memory, and registers are never redistributed."""
    yield not code.at(r"(ld|st)\.local|setmaxnreg")


RULES: tuple[Rule, ...] = (
    barriers,
    setup,
    tensor_memory,
    loads,
    operands,
    products,
    reads,
    stores,
    exponentials,
    registers,
)


def violations(ptx: str, kernel: ProjectExpSpec) -> list[str]:
    """Return the names of the rules that the PTX of `kernel` violates."""
    code = Code(ptx, kernel)
    return [rule.__name__ for rule in RULES if not _holds(rule, code)]


def _holds(rule: Rule, code: Code) -> bool:
    try:
        return all(rule(code))
    except (ValueError, IndexError, LookupError):  # an expected instruction is missing
        return False


def assembly_violations(sass: str, kernel: ProjectExpSpec) -> list[str]:
    """Return the instructions whose number in the machine code of `kernel` is unexpected."""
    code = kernel.config
    pair, multicast = ".2CTA" * (code.cluster > 1), ".MULTICAST" * (code.cluster > 1)
    expected = {
        f"UTCHMMA{pair}": TILE_K // 16,
        f"UTCBAR{pair}{multicast}": 2,
        f"UTMALDG.2D{pair}": 2,
        "LDTM.x64": 1,
        "UTMASTG.2D": int(kernel.store),
        "LDL": 0,
        "STL": 0,
    }
    found = re.findall(r"\b(?:UTCHMMA|UTCBAR|UTMALDG|LDTM|UTMASTG|LDL|STL)[\w.]*", sass)
    names = dict.fromkeys([*expected, *found])
    return [name for name in names if found.count(name) != expected.get(name, 0)]
