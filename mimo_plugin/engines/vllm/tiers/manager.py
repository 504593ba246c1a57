from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager
class MimoTieringManager(TieringOffloadingManager):
    def __init__(self, *, primary_tier, secondary_tiers, touch_interval_s):
        super().__init__(primary_tier=primary_tier, secondary_tiers=secondary_tiers)
    def keep_alive(self, keys, ctx): self.touch(keys, ctx)
    def bind(self, a): pass
