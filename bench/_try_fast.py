import time, torch, sys
from pathlib import Path
from torch import nn
from torch.nn import functional as F
from evenstep import Task
from evenstep.plan import Plan
from evenstep.worker.job import Job
from evenstep.worker.team import join
from evenstep.worker.train import train
torch.manual_seed(0)
x=torch.randn(512*200,784,device="cuda"); y=torch.randint(0,10,(512*200,),device="cuda")
def mlp(): return nn.Sequential(nn.Linear(784,256),nn.ReLU(),nn.Linear(256,10))
t=Task(model=mlp,train=(x,y),loss=lambda m,b:F.cross_entropy(m(b[0]),b[1]),optimizer=lambda p: torch.optim.AdamW(p,lr=1e-3),batch=512,epochs=100)
for strategy,devs in (("single",("cuda:0",)),("ddp",("cuda:0",)),("dp",("cuda:0","cuda:0"))):
  for fast in ("off","auto"):
    plan=Plan(batch=512,epochs=100,strategy=strategy,devices=devs,fast=fast,check_every=0)
    team=join(strategy,devs); job=Job(plan,t,Path("/tmp/x"),team); s=train(job.run,job.stepper,plan,job._peak_bytes)
    for _ in range(60): next(s)
    torch.cuda.synchronize(); r=[]
    for _ in range(5):
        a=time.perf_counter()
        for _ in range(200): next(s)
        torch.cuda.synchronize(); r.append((time.perf_counter()-a)/200*1e3)
    print(strategy,fast,[round(v,4) for v in sorted(r)],job.stepper.said,flush=True)
    if len(sys.argv)>1 and fast=="auto" and strategy=="single":
        import cProfile,pstats
        p=cProfile.Profile(); p.enable()
        for _ in range(400): next(s)
        p.disable(); pstats.Stats(p).sort_stats("tottime").print_stats(22)
