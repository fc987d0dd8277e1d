"""Rules over the PTX of the Blackwell kernels, of what no emulator sees.

`violations` names the rules that do not hold.  Barriers, sizes, masks and descriptors are what
`tests.emulation` executes: a wrong one hangs there, or gives wrong numbers.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator

from cutefce.cute_kernels.arch import arch_named
from cutefce.cute_kernels.arch.sm100 import Sm100
from cutefce.cute_kernels.spec.gemm import ProjectExpSpec

WAIT = re.compile(r"mbarrier\.try_wait\S* P1, \[(%r\d+)\]")
DEFINITION = re.compile(r"(\S+) (%\w+|\{[%\w, ]+\})(?:\|%p\d+)?, (.*);")


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
        self.mma_ctas = self.config.cluster
        counts = {"filled": self.config.stages, "drained": self.config.stages}
        counts |= {"computed": arch.ACC_STAGES, "read": arch.ACC_STAGES}
        named = [kind for kind, count in counts.items() for _ in range(count)]
        self.barriers = dict(zip(range(0, 8 * len(named), 8), named, strict=True))
        """Their kinds, by their offsets."""

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
            if found and register in found[2].strip("{}").split(", "):
                return i, found[1], [part.strip("{} ") for part in found[3].split(",")]
        raise LookupError(register)

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
        return self.barriers.get(self.offset(line, operand), "none")

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


def fences(code: Code) -> Iterator[bool]:
    """MMAs come behind fences of what they wait for, and tensor memory is freed behind all else."""
    for kind in ("read", "filled"):
        (wait,) = code.waits(kind)
        yield "fence::after_thread_sync" in code.lines[code.next(wait)]
    last = max(code.at(r"try_wait|^tcgen05\.(ld|wait|mma|commit)|cp\.async"))
    yield code.comes(
        last, "before_thread_sync", *sync_patterns(code), "after_thread_sync", "dealloc"
    )
    for name in ("alloc", "relinquish_alloc_permit", "dealloc"):
        yield len(code.at(rf"^tcgen05\.{name}\.cta_group::{code.mma_ctas}\.")) == 1


def sync_patterns(code: Code) -> tuple[str, ...]:
    """Return the instructions that synchronize all threads of a cluster."""
    cluster = (r"^barrier\.cluster\.arrive;", r"^barrier\.cluster\.wait;")
    return cluster if code.config.cluster > 1 else (r"^(bar|barrier)\.sync 0;",)


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
    address = re.findall(r"\[(.*?)\]", code.lines[release])[0]
    yield code.kind(release, address) == "read"


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


RULES: tuple[Rule, ...] = (setup, fences, reads, stores)


def violations(ptx: str, kernel: ProjectExpSpec) -> list[str]:
    """Return the names of the rules that the PTX of `kernel` violates."""
    code = Code(ptx, kernel)
    return [rule.__name__ for rule in RULES if not _holds(rule, code)]


def _holds(rule: Rule, code: Code) -> bool:
    try:
        return all(rule(code))
    except (ValueError, IndexError, LookupError):  # an expected instruction is missing
        return False
