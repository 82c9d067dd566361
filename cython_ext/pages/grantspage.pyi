from cython_ext.pages.page import Page
from cython_ext.readings import GrantsFlag, PageMode, PlanReading

class GrantsPage(Page):
    @staticmethod
    def create(
        *,
        vgpu_id: str,
        gpu_uuid: str,
        mode: PageMode,
        generation: int,
        memory_limit_bytes: int,
        total_memory_bytes: int,
        process_limit_bytes: int = 0,
        implicit_bytes: int = 0,
        window_ns: int = 1_000_000,
        grace_ns: int = 10_000_000_000,
        flags: GrantsFlag | int = 0,
    ) -> GrantsPage: ...
    @staticmethod
    def map_readonly(descriptor: int) -> GrantsPage: ...
    @property
    def generation(self) -> int: ...
    @property
    def vgpu_id(self) -> str: ...
    @property
    def gpu_uuid(self) -> str: ...
    @property
    def total_memory_bytes(self) -> int: ...
    @property
    def allowed_ns(self) -> int: ...
    @property
    def alive_ns(self) -> int: ...
    mode: PageMode
    flags: GrantsFlag
    company_ppm: int
    memory_limit_bytes: int
    process_limit_bytes: int
    card_limit_bytes: int
    present_bytes: int
    spare_bytes: int
    implicit_bytes: int
    implicit_ns: int
    slo_ns: tuple[int, int]
    window_ns: int
    grace_ns: int
    def wake(self) -> None: ...
    def plan(self) -> PlanReading: ...
