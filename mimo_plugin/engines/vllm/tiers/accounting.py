class TierAccounting:
    def __init__(self,*a): self.n=[]
    def looked_up(self,*a): self.n.append(("looked",)+a)
    def cut(self,*a): self.n.append(("cut",)+a)
    def loaded(self,hit,sizes): self.n.append(("loaded",hit.tokens,sizes))
    def drain(self): return None
