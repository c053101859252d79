# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 7. 走出这台机器 | Beyond This Machine

# %% [markdown]
# <div lang="zh">
#
# **目标**：文档到第 6 节为止，这一章往前再走一步：同一份代码怎样从笔记本里的 4 个进程，变成集群上的几百张卡。你会
#
# - 用 `torchrun` 真的启动训练，并看到损失和笔记本里**逐位相同**；
# - 知道 NCCL 和 gloo 有什么不同，出问题时该看哪里；
# - 在这台机器上扮演两台机器，量出 HYBRID_SHARD 省下的跨节点通信；
# - 把 4 个 rank 的 FSDP 检查点，读进 2 个 rank 的 ZeRO，再读进单进程；
# - 训练到一半杀掉一个进程，看它自己恢复，损失曲线分毫不差；
# - 估计真实硬件上什么会变。
#
# **时间**：约 2 小时。**对应文档**：之后的内容（第 2.2 节的 `init_process_group(backend="nccl")`、4.5 节的多节点在这里落地）。**先读**：第 2、4、5 章。本章没有单独的练习。
#
# </div>
#
# <div lang="en">
#
# **Goals**: the document ends with section 6; this chapter takes one more step, from 4 processes of a notebook to hundreds of cards of a cluster, with the same code. You will
#
# - really start a training with `torchrun` and see losses that equal the notebook's **to the last bit**;
# - know how NCCL differs from gloo, and where to look when something goes wrong;
# - play two machines on this one, and measure the traffic between them that HYBRID_SHARD saves;
# - read a checkpoint of FSDP on 4 ranks into ZeRO on 2 ranks, and into a single process;
# - kill a process in the middle of training, watch it recover, and find the loss curve unchanged;
# - estimate what will be different on real hardware.
#
# **Time**: about 2 hours. **Follows** what comes after the document (the `init_process_group(backend="nccl")` of section 2.2 and the several nodes of 4.5 come true here). **Before this**: chapters 2, 4 and 5. This chapter has no exercises of its own.
#
# </div>

# %%
# %load_ext minidist
import json
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import minidist as md
from minidist.comm import collectives as coll
from minidist.learn import figures
from minidist.plan import formulas

os.chdir(tempfile.mkdtemp())          # the scripts and checkpoints of this chapter go here

# %% [markdown]
# ## 7.1 torchrun: 同一份代码 | The same code

# %% [markdown]
# <div lang="zh">
#
# 笔记本里，`%%ranks` 替我们开进程。集群上这是 **torchrun** 的事：它在每台机器上启动若干个**一样的** Python 进程，用环境变量告诉每个进程它是谁，然后盯着它们，有一个死了就全部停下（或重启）。仅此而已：切数据、同步梯度都还是你的代码做的。
#
# | 变量 | 含义 |
# |---|---|
# | `RANK`, `WORLD_SIZE` | 在整个作业里是第几个，一共几个 |
# | `LOCAL_RANK`, `LOCAL_WORLD_SIZE` | 在**这台机器**上是第几个，一共几个。用它选 GPU |
# | `MASTER_ADDR`, `MASTER_PORT` | 第一次碰头的地方（rank 0 所在的机器） |
#
# **先猜**：`torchrun` 启动 3 个进程，脚本里的 `print` 会打印几次？
#
# </div>
#
# <div lang="en">
#
# In the notebook `%%ranks` starts the processes. On a cluster that is the job of **torchrun**: on each machine it starts a number of **identical** Python processes, tells each by environment variables who it is, and watches them; when one dies, all are stopped (or restarted). That is all: cutting the data and averaging gradients is still up to your code.
#
# | variable | meaning |
# |---|---|
# | `RANK`, `WORLD_SIZE` | this process's number in the whole job, and how many there are |
# | `LOCAL_RANK`, `LOCAL_WORLD_SIZE` | the same **on this machine**; this one chooses the GPU |
# | `MASTER_ADDR`, `MASTER_PORT` | where all meet for the first time (rank 0's machine) |
#
# **Predict**: `torchrun` starts 3 processes. How often does a `print` of the script print?
#
# </div>

# %%
# %%writefile hello.py
import os

names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
line = ", ".join(f"{name}={os.environ.get(name)}" for name in names)
print(line + "\n", end="")                  # in one piece, or lines of several processes may mix

# %%
def torchrun(arguments, timeout=120):
    """`torchrun ARGUMENTS`, in the long form that works wherever this notebook's Python is."""
    command = [sys.executable, "-m", "torch.distributed.run", *arguments.split()]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})

print("python hello.py")
print(subprocess.run([sys.executable, "hello.py"], capture_output=True, text=True).stdout)
print("torchrun --standalone --nproc-per-node 3 hello.py")
print(*sorted(torchrun("--standalone --nproc-per-node 3 hello.py").stdout.splitlines()), sep="\n")

# %% [markdown]
# <div lang="zh">
#
# 3 次：没有哪个进程是“主程序”，每个都从头跑到尾。（`--standalone`：只用一台机器，端口自动挑。）第一行是初学者最常见的错误：用 `python` 启动，变量不存在，程序以为自己是全世界唯一的 rank，照样训练，只是慢 N 倍。
#
# 一个真正的训练脚本。和前几章的区别只有 `with md.init() as context:`，它读这些变量，挑后端和设备，建好进程组，最后拆掉：
#
# </div>
#
# <div lang="en">
#
# 3 times: no process is "the main program", each runs from top to bottom. (`--standalone`: one machine only, with a port that is free.) The first line is the most common mistake of beginners: started with `python` there are no variables, the program takes itself for the only rank in the world, and trains on, only N times more slowly.
#
# Now a real training script. All that is new compared with earlier chapters is `with md.init() as context:`, which reads these variables, chooses backend and device, makes the process group, and takes it down at the end:
#
# </div>

# %%
# %%writefile train.py
import json
import sys

import torch

import minidist as md
from minidist.train.data import TextBatches, load_tokens

def train(strategy, steps=6):
    with md.init() as context:             # joins the job, whoever started it
        model = md.build_gpt(md.GPTConfig(seq=32)).to(context.device)
        model, optimizer = md.shard(model, torch.optim.AdamW, strategy, lr=1e-3)
        batches, losses = TextBatches(load_tokens(), seq=32, batch=16), []
        for step in range(steps):
            inputs, targets = batches.at(step, context.rank, context.world_size)
            loss = md.loss_fn(model(inputs.to(context.device)), targets.to(context.device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return context.rank, losses

if __name__ == "__main__":
    rank, losses = train(sys.argv[1])
    if rank == 0:                          # or every rank would print
        print(json.dumps(losses))

# %% [markdown]
# <div lang="zh">
#
# **先猜**：`torchrun` 启动的 4 个进程，和 `%%ranks 4` 的 4 个进程，损失会逐位相同吗？
#
# </div>
#
# <div lang="en">
#
# **Predict**: will 4 processes of `torchrun` and 4 of `%%ranks 4` have the same losses, to the last bit?
#
# </div>

# %%
# %%ranks 4 --out losses
train = runpy.run_path("train.py")["train"]
_, losses = train("fsdp")

# %%
job = torchrun("--standalone --nproc-per-node 4 train.py fsdp")
from_torchrun = json.loads(job.stdout)
print("torchrun:", *from_torchrun[-3:])
print("%%ranks: ", *losses[0][-3:])
print("the same bits:", from_torchrun == losses[0])

# %% [markdown]
# <div lang="zh">
#
# 逐位相同。所以在笔记本里学到、调通的东西，可以原样搬走。`minidist train` 就是这样一个脚本，选项更多：
#
# ```bash
# torchrun --standalone --nproc-per-node 8 -m minidist train --strategy fsdp --steps 100
# ```
#
# </div>
#
# <div lang="en">
#
# To the last bit. What you learned and debugged in the notebook can be taken along as it is. `minidist train` is such a script, with more options:
#
# ```bash
# torchrun --standalone --nproc-per-node 8 -m minidist train --strategy fsdp --steps 100
# ```
#
# </div>

# %% [markdown]
# ### 出错：一个 rank 跳过了一步 | A mistake: one rank skips a step

# %% [markdown]
# <div lang="zh">
#
# 集群上最折磨人的错误是**挂起**：没有报错，GPU 占用率还是 100%。原因几乎总是各 rank 的通信对不上。
#
# **先猜**：下面的 rank 2 在第 1 步 `continue` 了。rank 0 会在哪一步停住？
#
# </div>
#
# <div lang="en">
#
# The most tiresome failure on a cluster is a **hang**: no error, and the GPUs show 100 %. Nearly always the ranks' communication does not match.
#
# **Predict**: rank 2 below does a `continue` in step 1. In which step does rank 0 get stuck?
#
# </div>

# %%
# %%writefile stuck.py
import torch

import minidist as md
from minidist.comm import collectives as coll

with md.init(timeout=10) as context:
    for step in range(3):
        gradient = torch.ones(1000)
        if context.rank == 2 and step == 1:
            continue                       # "this batch looks odd"
        coll.all_reduce(gradient, by="gradients")

# %%
def report_of(job):
    """What the first rank that could tell wrote about all of them."""
    lines = job.stderr.replace(os.getcwd() + "/", "").splitlines()
    start = next(i for i, line in enumerate(lines) if "What the ranks of this job" in line)
    who = lines[start].partition(": ")[0] + ": "              # "[rank0]: " or whoever it was
    return [line.removeprefix(who) for line in lines[start:] if line.startswith(who)]

job = torchrun("--standalone --nproc-per-node 3 stuck.py")
print("exit code", job.returncode)
print(*report_of(job), sep="\n")

# %% [markdown]
# <div lang="zh">
#
# 不是第 1 步，而是最后一步：rank 2 的第 2 步和别人的第 1 步配上了对（数值已经错了），到第 2 步别人才等不到它。所以**挂起的地方不是出错的地方**。每个 rank 的错误里都有同一张表：谁等在哪一行，谁没来，序列从哪里开始不同。NCCL 也有类似的记录（flight recorder，见下）。
#
# </div>
#
# <div lang="en">
#
# Not in step 1 but in the last: rank 2's step 2 was paired with the others' step 1 (the numbers were wrong from there on), and only in step 2 do they wait for it in vain. So **where it hangs is not where it went wrong**. The error on every rank has the same table: who waits at which line, who did not come, where the sequences part. NCCL keeps a similar record (the flight recorder, see below).
#
# </div>

# %% [markdown]
# ## 7.2 NCCL

# %% [markdown]
# <div lang="zh">
#
# 有 GPU 时，`md.init()` 选 NCCL（`init_process_group(backend="nccl")`），代码不用改。不同的是下面这些：
#
# | | gloo（这里） | NCCL（GPU） |
# |---|---|---|
# | 数据在哪里走 | CPU 内存、TCP | NVLink、PCIe、InfiniBand，不经过 CPU |
# | 一个 rank | 一个进程 | 一个进程**配一张卡**：先 `torch.cuda.set_device(LOCAL_RANK)`，否则都挤在 0 号卡上 |
# | `work.wait()` | CPU 等到完成 | **让当前的流去等**，CPU 接着往下走 |
# | 何时报错 | 立刻 | 晚得多：内核排队执行，错误在之后某次同步时才冒出来 |
# | 计时 | `perf_counter` | 先 `torch.cuda.synchronize()`，或用 CUDA event |
# | 点对点 | 按标签（tag）配对 | 按**次序**配对 |
# | `reduce_scatter` | 我们自己的直接交换（原生的会发 all-reduce 的量） | 原生的 |
#
# 出问题时先看这几个环境变量：
#
# | 变量 | 用途 |
# |---|---|
# | `NCCL_DEBUG=INFO` | 打印选了哪块网卡、哪种传输。慢的时候先看有没有 `NET/Socket`：那是没用上 InfiniBand |
# | `NCCL_SOCKET_IFNAME=eth0` | 指定网卡，多网卡的机器上最常见的连不上的原因 |
# | `NCCL_IB_DISABLE=1`, `NCCL_P2P_DISABLE=1` | 排除法：关掉 InfiniBand 或卡间直连，看问题还在不在 |
# | `TORCH_FR_BUFFER_SIZE=2000` | 打开 flight recorder（旧版叫 `TORCH_NCCL_TRACE_BUFFER_SIZE`）：超时时每个 rank 写下最近的集合通信，再用 `torchfrtrace` 对照 |
# | `CUDA_LAUNCH_BLOCKING=1` | 让错误在出错的那一行冒出来（很慢，只用来调试） |
#
# 通信快不快，用**总线带宽（bus bandwidth）**来说：数据大小 ÷ 时间，再乘上每种集合通信的系数（all-reduce 是 $2(N-1)/N$），这样与 rank 数无关，可以直接和互连的标称带宽比。`nccl-tests` 就这么报。在这里量一量 gloo：
#
# **先猜**：4 个进程，16 MB，同一台机器的内存里。总线带宽比 H100 的 NVLink（每方向 450 GB/s）慢几个数量级？
#
# </div>
#
# <div lang="en">
#
# With GPUs `md.init()` chooses NCCL (`init_process_group(backend="nccl")`), and the code stays. What differs:
#
# | | gloo (here) | NCCL (GPUs) |
# |---|---|---|
# | where data travel | CPU memory, TCP | NVLink, PCIe, InfiniBand, past the CPU |
# | a rank | a process | a process **with a card of its own**: `torch.cuda.set_device(LOCAL_RANK)` first, or all crowd on card 0 |
# | `work.wait()` | the CPU waits until it is done | **the current stream waits**, the CPU goes on |
# | when errors show | at once | much later: kernels queue up, and the error appears at some later synchronisation |
# | timing | `perf_counter` | `torch.cuda.synchronize()` first, or CUDA events |
# | point to point | matched by tag | matched by **order** |
# | `reduce_scatter` | our own direct exchange (the native one sends as much as an all-reduce) | native |
#
# When something is wrong, these environment variables come first:
#
# | variable | what for |
# |---|---|
# | `NCCL_DEBUG=INFO` | prints which interface and transport were chosen. When it is slow, look for `NET/Socket`: InfiniBand is not in use |
# | `NCCL_SOCKET_IFNAME=eth0` | names the interface; machines with several are the usual reason why ranks cannot connect |
# | `NCCL_IB_DISABLE=1`, `NCCL_P2P_DISABLE=1` | elimination: does the problem stay without InfiniBand, or without direct links between cards? |
# | `TORCH_FR_BUFFER_SIZE=2000` | switches the flight recorder on (formerly `TORCH_NCCL_TRACE_BUFFER_SIZE`): at a timeout each rank writes down its last collectives, to be compared with `torchfrtrace` |
# | `CUDA_LAUNCH_BLOCKING=1` | makes errors appear at the line that caused them (very slow, for debugging only) |
#
# Communication speed is quoted as **bus bandwidth**: size ÷ time, times a factor for each collective ($2(N-1)/N$ for an all-reduce). It does not depend on the number of ranks and can be compared with what the link promises; `nccl-tests` reports it. Here is gloo's:
#
# **Predict**: 4 processes, 16 MB, inside one machine's memory. By how many orders of magnitude is the bus bandwidth below an H100's NVLink (450 GB/s per direction)?
#
# </div>

# %%
# %%ranks 4 --fast --out measured
def seconds(work, repeats=7):
    times = []
    for _ in range(repeats):
        coll.barrier()
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return sorted(times)[repeats // 2]

measured = {}
for size in (4_000, 400_000, 16_000_000):          # bytes
    tensor = torch.zeros(size // 4)
    taken = seconds(lambda: coll.all_reduce(tensor))
    measured[size] = taken
    if rank == 0:
        bus = formulas.bus_bandwidth("all_reduce", size, taken, world_size)
        print(f"all-reduce of {size / 1e6:>6.3f} MB: {taken * 1e3:6.2f} ms, bus bandwidth {bus / 1e9:8.4f} GB/s")

# %% [markdown]
# <div lang="zh">
#
# 约三个数量级。还可以看到小消息的带宽低得可怜：时间几乎全是延迟。DDP 的桶、FSDP 的单元、ZeRO 的扁平缓冲区，都是为了不发小消息。
#
# </div>
#
# <div lang="en">
#
# About three. Mind also how poor the bandwidth of small messages is: they are all latency. DDP's buckets, FSDP's units and ZeRO's flat buffers exist in order not to send small messages.
#
# </div>

# %% [markdown]
# ## 7.3 几台机器 | Several machines

# %% [markdown]
"""
<div lang="zh">

在**每台**机器上运行同一条命令，指向同一个碰头地点（rendezvous）：

```bash
# 两台机器，各 8 张卡；在两台上各运行一次
torchrun --nnodes 2 --nproc-per-node 8 \
    --rdzv-backend c10d --rdzv-endpoint node1:29500 --rdzv-id job1 \
    train.py fsdp
```

Slurm 会替你在每台机器上各运行一次（一台机器一个任务，不是一张卡一个）：

```bash
#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=96
#SBATCH --requeue                           # 节点坏了：重新排队，从最近的检查点接着训练
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export OMP_NUM_THREADS=12
srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node 8 --max-restarts 3 \
    --rdzv-backend c10d --rdzv-endpoint "$head:29500" --rdzv-id "$SLURM_JOB_ID" \
    -m minidist train --strategy fsdp --checkpoint-dir /shared/run1 --save-every 200
```

几条经验：代码、环境、数据在每台机器上都要一样（最好放在共享的文件系统上）；端口要互相能通；`nvidia-smi topo -m` 看卡间怎么连；先用 `minidist doctor` 检查每台机器，再用两台跑通，最后才上全部。

在这台机器上也能扮演两台：启动两个 torchrun，各带 2 个 rank。

**先猜**：第二台机器上第一个进程的 `RANK` 和 `LOCAL_RANK` 各是多少？

</div>

<div lang="en">

Run the same command on **each** machine, with the same place to meet (rendezvous):

```bash
# two machines of 8 cards; run this once on each
torchrun --nnodes 2 --nproc-per-node 8 \
    --rdzv-backend c10d --rdzv-endpoint node1:29500 --rdzv-id job1 \
    train.py fsdp
```

Slurm runs it on every machine for you (one task per machine, not one per card):

```bash
#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=96
#SBATCH --requeue                           # after a node failure: queued again, goes on from the latest checkpoint
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export OMP_NUM_THREADS=12
srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node 8 --max-restarts 3 \
    --rdzv-backend c10d --rdzv-endpoint "$head:29500" --rdzv-id "$SLURM_JOB_ID" \
    -m minidist train --strategy fsdp --checkpoint-dir /shared/run1 --save-every 200
```

Some advice from practice: code, environment and data have to be the same on every machine (best on a shared file system); the port must be open between them; `nvidia-smi topo -m` shows how cards are linked; check each machine with `minidist doctor`, get two of them to run, and only then take all.

Two machines can be played on this one: start two torchruns, each with 2 ranks.

**Predict**: what are `RANK` and `LOCAL_RANK` of the first process on the second machine?

</div>
"""

# %%
# %%writefile machines.py
import os

from torch.distributed.device_mesh import init_device_mesh

import minidist as md
from minidist.train.data import TextBatches, load_tokens
from minidist.train.model import Block

with md.init() as context:
    n, cards = context.world_size, int(os.environ["LOCAL_WORLD_SIZE"])
    print(f"RANK={context.rank} LOCAL_RANK={context.local_rank}\n", end="")
    mesh = init_device_mesh(context.device.type, (n // cards, cards), mesh_dim_names=("machines", "cards"))
    inputs, targets = TextBatches(load_tokens(), seq=32, batch=16).at(0, context.rank, n)
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"):
        model = md.build_gpt(md.GPTConfig(seq=32))
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        model = md.FSDP(model, strategy=strategy, units=[Block], group=mesh if "HYBRID" in strategy else None)
        md.loss_fn(model(inputs), targets).backward()
        with md.measure(memory=False, timeline=False) as m:
            md.loss_fn(model(inputs), targets).backward()
        # Between machines: all of the group "machines", and in the world what goes to ranks over there.
        share = {mesh["machines"].get_group().group_name: 1, mesh["cards"].get_group().group_name: 0}
        sent = sum(total.sent_bytes * share.get(group, (n - cards) / (n - 1))
                   for group, total in m.traffic.by_group.items())
        if context.rank == 0:
            print(f"{strategy:>14}: {sent / size:.2f} copies of the model sent to the other machine")

# %%
import socket

def two_machines(script):
    """Two torchruns with 2 ranks each, as two machines would run them; all they printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    jobs = []
    for node in (0, 1):
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2",
                   "--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", str(port), script]
        jobs.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                     env=os.environ | {"OMP_NUM_THREADS": "1"}))
    return [job.communicate(timeout=120)[0].splitlines() for job in jobs]

for node, lines in enumerate(two_machines("machines.py")):
    who = sorted(line for line in lines if line.startswith("RANK"))
    print(f"machine {node}:", *who, *[line for line in lines if line not in who], sep="\n    ")

# %% [markdown]
# <div lang="zh">
#
# 第二台的第一个进程：`RANK=2`，`LOCAL_RANK=0`。把两者弄混（用 `RANK` 选 GPU）在一台机器上一切正常，上了两台就报 “invalid device ordinal”。
#
# 跨节点的份数是 1.5、1.0、0.5：HYBRID_SHARD 在节点内分片（那里的互连快十倍），节点之间只对分片做 all-reduce。卡越多差别越大，8 个节点 × 8 卡时是 2.62、1.75、0.22（6.1 节的结论 i）。代价：状态只除以 8，不除以 64。在 `md.FSDP(..., strategy="HYBRID_SHARD")` 里，每台机器是一组，不用自己建网格。
#
# 我们的测试还在两个**网络命名空间**之间跑过这件事，各有各的地址，从网卡的计数器上读字节，与公式相差不到百分之一。
#
# </div>
#
# <div lang="en">
#
# The first process of the second machine has `RANK=2` and `LOCAL_RANK=0`. Mixing them up (choosing the GPU by `RANK`) works on one machine, and on two gives "invalid device ordinal".
#
# Copies across: 1.5, 1.0, 0.5. HYBRID_SHARD shards inside a node, where links are ten times faster, and between nodes all-reduces the shards only. The more cards, the larger the difference: 2.62, 1.75, 0.22 with 8 nodes of 8 (claim i of section 6.1). The price: states are divided by 8, not by 64. With `md.FSDP(..., strategy="HYBRID_SHARD")` every machine is a group of its own accord; no mesh needed.
#
# Our tests also do this between two **network namespaces** with addresses of their own and read the bytes off the interface's counters; they are within one per cent of the formula.
#
# </div>

# %% [markdown]
# ## 7.4 检查点 | Checkpoints

# %% [markdown]
# <div lang="zh">
#
# 单卡时 `torch.save(model.state_dict())` 就够了。分片之后呢？
#
# **先猜**：4 个 rank 的 FSDP，只在 rank 0 上存 `[p for p in model.parameters()]`，存下了模型的多少？
#
# </div>
#
# <div lang="en">
#
# On one card `torch.save(model.state_dict())` will do. And with shards?
#
# **Predict**: FSDP on 4 ranks, and only rank 0 saves `[p for p in model.parameters()]`. How much of the model is that?
#
# </div>

# %%
from minidist.train.data import TextBatches, load_tokens

config = md.GPTConfig(seq=32)
batches = TextBatches(load_tokens(), seq=32, batch=16)

def train_steps(model, optimizer, steps):
    losses = []
    for step in steps:
        inputs, targets = batches.at(step, coll.rank(), coll.world_size())
        loss = md.loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(coll.all_reduce(loss.detach(), "mean").item())
    return losses

# %%
# %%ranks 4
model, optimizer = md.shard(md.build_gpt(config), torch.optim.AdamW, "fsdp", lr=1e-3)
losses = train_steps(model, optimizer, range(4))
if rank == 0:
    saved = sum(p.numel() for p in model.parameters())
    print(f"rank 0 holds {saved:,} of {config.parameters:,} parameters")

# %% [markdown]
# <div lang="zh">
#
# 四分之一：其余的永远丢了，而且要到读的时候才发现。把整个模型收集到 rank 0 再存也不行：大模型放不进一张卡，这正是分片的原因。
#
# `md.save` 让每个 rank 写自己那一份，用参数**原来的名字**和元素范围作标记，不收集任何东西。于是读的时候与谁写的无关：换策略、换 rank 数都可以，逐位相同。
#
# **先猜**：用 4 个 rank 的 FSDP 存，用 2 个 rank 的 ZeRO-1 读并接着训练，和单进程从头训练到底相比，损失相差多少？
#
# </div>
#
# <div lang="en">
#
# A quarter: the rest is lost for good, and nobody notices until it is loaded. Gathering the whole model on rank 0 is no way either: a large one does not fit there, which is why it was sharded.
#
# `md.save` lets every rank write its own part, labelled with the parameter's **original name** and a range of elements; nothing is gathered. Reading then does not depend on who wrote: another strategy, another number of ranks, the same bits.
#
# **Predict**: saved by FSDP on 4 ranks, loaded by ZeRO-1 on 2 ranks, which trains on. How far are the losses from a single process that trained all the way?
#
# </div>

# %%
# %%ranks --out whole
md.save("run/step-4", model, optimizer, step=4, losses=losses)
whole = model.full_state_dict()                # only to compare below

# %%
print(*sorted(path.name for path in Path("run/step-4").iterdir()))
plain = md.build_gpt(config)
with md.init():                                # a world of one, as in a script started with python
    print({name: value for name, value in md.load("run/step-4", plain).items() if name != "losses"})
same = all(torch.equal(value, whole[0][name]) for name, value in plain.state_dict().items())
print("in a plain module, one process: the same bits:", same)

# %%
# %%ranks 2 --out continued
model, optimizer = md.shard(md.build_gpt(config, seed=1), torch.optim.AdamW, "zero1", lr=1e-3)
extra = md.load("run/step-4", model, optimizer)
continued = extra["losses"] + train_steps(model, optimizer, range(extra["step"], 8))

# %%
# %%ranks 1 --out alone
model = md.build_gpt(config)
alone = train_steps(model, torch.optim.AdamW(model.parameters(), lr=1e-3), range(8))

# %%
curves = {"one process": alone[0], "fsdp on 4 ranks, then zero1 on 2": continued[0]}
figures.loss_curves(curves, "one process");

# %% [markdown]
# <div lang="zh">
#
# 读进来的参数和优化器状态逐位相同；接着训练，只剩 float32 加法次序的差别。`md.save` 另外保证了几件事：
#
# | 会出什么事 | 怎么防 |
# |---|---|
# | 存到一半机器死了 | 先写到旁边，全部写完才改名；有最终名字的就是完整的 |
# | 磁盘满了 | 所有 rank 都报错，旧的检查点不动 |
# | 读错了模型 | 改动任何东西之前报错，说出哪个名字、哪个形状不对 |
# | 存档很慢 | `asynchronous=True`：拷到主机内存就返回，后台线程写 |
# | 检查点里藏着代码 | 不执行任何 pickle 里的代码 |
# | 忘了存数据读到哪里、学习率、随机数 | 步数、采样器、调度器作为 `extra` 存；随机状态自动存 |
#
# </div>
#
# <div lang="en">
#
# Parameters and optimizer states come back bit by bit; training on differs only by the order of float32 additions. And `md.save` sees to some more:
#
# | what may happen | what is done about it |
# |---|---|
# | the machine dies while saving | written aside, renamed when all is there: whatever has the final name is complete |
# | the disk is full | an error on all ranks, the older checkpoint untouched |
# | the wrong model is loaded | an error before anything changes that names what does not fit |
# | saving is slow | `asynchronous=True`: returns after copying to host memory, a thread writes |
# | code hidden in a checkpoint | none is ever run from its files |
# | position in the data, learning rate, random numbers forgotten | step, sampler, scheduler go in as `extra`; random state is always saved |
#
# </div>

# %%
try:
    with md.init():
        md.load("run/step-4", md.build_gpt(md.GPTConfig(seq=32, width=128)))
except ValueError as error:
    print(f"{type(error).__name__}: {error}")

# %% [markdown]
# ## 7.5 一个 rank 被杀 | A rank is killed

# %% [markdown]
# <div lang="zh">
#
# 一张卡几年才坏一次，一万张卡几小时就坏一次。训练 Llama 3 时，16,384 张 H100 在 54 天里意外中断了 419 次，大约每 3 小时一次。所以大训练的脚本必须能**从任何地方断开、自己接上**。
#
# 办法很朴素：`torchrun --max-restarts` 发现有进程死了，就停掉其余的，重新启动全部；脚本一开始先找最近的检查点。下面的脚本在第 5 步让 rank 1 收到 SIGKILL（只在第一次启动时），就像被断了电。
#
# **先猜**：它会从第几步接着训练？最终的损失曲线和没被打断的会差多少？
#
# </div>
#
# <div lang="en">
#
# A card fails once in years, ten thousand cards fail every few hours. While Llama 3 was trained, 16,384 H100s were interrupted unexpectedly 419 times in 54 days, about every 3 hours. The script of a large training must be able to **break off anywhere and carry on by itself**.
#
# The way is plain: `torchrun --max-restarts` notices a dead process, stops the others and starts all again; the script begins by looking for the latest checkpoint. The one below sends rank 1 a SIGKILL in step 5 (of the first start only), as if the power had failed.
#
# **Predict**: from which step will it go on? How far will the loss curve be from an undisturbed one?
#
# </div>

# %%
# %%writefile elastic.py
import json
import os
import signal

import torch

import minidist as md
from minidist.train.checkpoint import latest
from minidist.train.data import TextBatches, load_tokens

def train(folder, killed_in_step=None):
    with md.init() as context:
        model, optimizer = md.shard(md.build_gpt(md.GPTConfig(seq=32)), torch.optim.AdamW, "zero1", lr=1e-3)
        batches, start, losses = TextBatches(load_tokens(), seq=32, batch=16), 0, []
        if found := latest(folder):                       # the latest complete checkpoint, if any
            saved = md.load(found, model, optimizer)
            start, losses = saved["step"], saved["losses"]
        for step in range(start, 8):
            if step == killed_in_step and context.rank == 1 and start == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            inputs, targets = batches.at(step, context.rank, context.world_size)
            loss = md.loss_fn(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if (step + 1) % 2 == 0:
                md.save(f"{folder}/step-{step + 1}", model, optimizer, step=step + 1, losses=losses)
        return context.rank, start, losses

if __name__ == "__main__":
    rank, start, losses = train("killed", killed_in_step=5)
    if rank == 0:
        print(json.dumps({"started from step": start, "losses": losses}))

# %%
# %%ranks 2 --out undisturbed
import shutil

if rank == 0:
    shutil.rmtree("undisturbed", ignore_errors=True)      # so that this cell can be run again
coll.barrier()
_, _, undisturbed = runpy.run_path("elastic.py")["train"]("undisturbed")

# %%
shutil.rmtree("killed", ignore_errors=True)                # so that this cell can be run again
job = torchrun("--standalone --nproc-per-node 2 --max-restarts 2 elastic.py")
result = json.loads(job.stdout)
print("a rank was killed:", "Signal 9 (SIGKILL)" in job.stderr or "exitcode: -9" in job.stderr)
print("then it started from step", result["started from step"])
print("the loss curve has the same bits:", result["losses"] == undisturbed[0])

# %% [markdown]
# <div lang="zh">
#
# 从第 4 步（最近的检查点）接着来，第 4 步重算一遍，曲线**逐位相同**：因为 batch 只由步数决定，优化器状态逐位还原，加法次序也相同。`minidist train --checkpoint-dir run1` 就是这样做的，而且可以换一个 rank 数接着训练。
#
# 多久存一次？存一次花 $\delta$ 秒，平均每 $M$ 秒坏一次：存得太勤浪费在存档上，太疏浪费在重算上。Young 1974 的近似：间隔 $\sqrt{2\,\delta\,M}$。
#
# **先猜**：一张卡平均 5 年坏一次，存一次 30 秒。1,000 张和 16,000 张卡，各该多久存一次？
#
# </div>
#
# <div lang="en">
#
# It goes on from step 4, the latest checkpoint, repeats step 4, and the curve is the same **to the last bit**: a batch depends on the step alone, optimizer states are restored bit by bit, and additions happen in the same order. `minidist train --checkpoint-dir run1` does just this, and can go on with another number of ranks.
#
# How often to save? With $\delta$ seconds per save and a failure every $M$ seconds, saving too often wastes time on saving, too rarely on repeating. Young's approximation of 1974: an interval of $\sqrt{2\,\delta\,M}$.
#
# **Predict**: a card fails every 5 years, a save takes 30 seconds. How often should 1,000 cards save, and how often 16,000?
#
# </div>

# %%
for cards in (8, 1_000, 16_000):
    between_failures = 5 * 365 * 24 * 3600 / cards
    interval = (2 * 30 * between_failures) ** 0.5
    lost = 30 / interval + interval / 2 / between_failures       # saving, and repeating half an interval
    print(f"{cards:>6,} cards: a failure every {between_failures / 3600:>7,.1f} hours, "
          f"save every {interval / 60:>5.0f} minutes, {lost:.1%} of the time lost")

# %% [markdown]
# ## 7.6 真实硬件上什么会变 | What changes on real hardware

# %% [markdown]
# <div lang="zh">
#
# 字节数、模型状态的内存、损失曲线：在这里量到的，到了集群上**基本**一样，因为它们只取决于算法（bf16 和显存碎片除外，见下表）。**时间**不一样，因为计算和通信的**比例**完全不同。先量这台机器：
#
# **先猜**：H100 的计算比这台机器的一个核快几个数量级？通信呢？
#
# </div>
#
# <div lang="en">
#
# Bytes, the memory of model states, loss curves: what you measured here holds on a cluster **by and large**, since they depend on the algorithm only (for bf16 and fragmentation see the table below). **Time** does not, because the **ratio** of compute to communication is another world. Measure this machine first:
#
# **Predict**: by how many orders of magnitude does an H100 compute faster than one core of this machine? And communicate?
#
# </div>

# %%
from minidist.plan.hardware import accelerator, cluster

torch.set_num_threads(1)
a = torch.randn(1024, 1024)
times = []
for _ in range(5):
    start = time.perf_counter()
    a @ a
    times.append(time.perf_counter() - start)
flops = 2 * 1024**3 / min(times)
wire = formulas.bus_bandwidth("all_reduce", 16_000_000, measured[0][16_000_000], 4)

print(f"{'':>16} {'TFLOP/s':>8} {'GB/s inside':>12} {'GB/s between':>13} {'FLOPs per byte inside':>22}")
print(f"{'one core, gloo':>16} {flops / 1e12:>8.2f} {wire / 1e9:>12.1f} {'':>13} {flops / wire:>22,.0f}")
for name in ("rtx4090", "v100", "a100", "h100", "b200"):
    one = cluster(name, 16)
    peak = accelerator(name).flops["bf16"] * accelerator(name).efficiency
    inside, between = one.intra.bandwidth, one.inter.bandwidth
    print(f"{name:>16} {peak / 1e12:>8.0f} {inside / 1e9:>12.0f} {between / 1e9:>13.1f} {peak / inside:>22,.0f}")

# %% [markdown]
# <div lang="zh">
#
# 计算快近四个数量级，通信快近三个：算得越快，越要等互连。最后一列是关键：发一个字节的时间里能算多少次。这台机器上是一百上下，GPU 上是几百到几千；有 NVLink 的卡，出了节点再乘十左右。所以在这里通信几乎白送（重叠也看不出多少好处），在 GPU 上通信才是主角：第 2 到 5 章的桶、预取、重叠，都是为那一列准备的。
#
# 拿 7B 模型、全局 batch 512 看强扩展（总工作量不变，卡越来越多）：
#
# **先猜**：机器之间用 400 Gbit/s 的网（每卡一个口）和 25 Gbit/s 的网，从 8 卡加到 16 卡，各会快多少？
#
# </div>
#
# <div lang="en">
#
# Almost four orders of magnitude in computing, under three in communication: the faster the computing, the longer the wait for the links. The last column is the point: how much can be computed while one byte is sent. About a hundred on this machine, hundreds to thousands on GPUs, and between nodes about ten times that for cards with NVLink. That is why communication is nearly free here (and overlap shows little), and the main character on GPUs: the buckets, prefetching and overlap of chapters 2 to 5 are made for that column.
#
# Strong scaling (the same work on more and more cards) of a 7B model with a global batch of 512:
#
# **Predict**: with a network of 400 Gbit/s per card between machines, and with one of 25 Gbit/s: how much faster is it to go from 8 cards to 16?
#
# </div>

# %%
from minidist.plan import PRESETS, simulate
from minidist.plan.costs import Layout

def step_seconds(gpus, gigabits, kind):
    machines = cluster("h100", gpus, port=gigabits * 1e9 / 8)
    layout = Layout(dp=gpus, dp_kind=kind, shard=8 if kind == "hybrid" else None)
    return simulate(PRESETS["llama-2-7b"], machines, layout, 512).seconds

worlds = (8, 16, 32, 64, 128, 256)
curves = {
    f"{label}, {gigabits} Gbit/s": {n: step_seconds(n, gigabits, kind) for n in worlds}
    for gigabits in (400, 25) for kind, label in (("fsdp", "FULL_SHARD"), ("hybrid", "HYBRID_SHARD"))
}
figures.scaling_curves(curves)
for name, times in curves.items():
    print(f"{name:>24}: 8 cards {times[8]:5.1f} s, 16 cards {times[16]:5.1f} s per step")

# %% [markdown]
# <div lang="zh">
#
# 好的网上几乎线性；慢的网上，第二台机器反而让 FULL_SHARD **慢一倍**，HYBRID_SHARD 勉强打平。所以买机器时先问网络，选策略时先问互连。
#
# 这些是模拟。凭什么信它？它的每个硬件常数都写明出处；每种卡只有“算力利用率”一个数是用少数几次训练拟合的；其余已发表的训练记录用来对照（内存另有 11 条对照，误差 −34%～+11%）：
#
# </div>
#
# <div lang="en">
#
# On a good network nearly linear; on a slow one the second machine makes FULL_SHARD **twice as slow**, and HYBRID_SHARD just breaks even. When you buy machines ask for the network first, and when you choose a strategy, for the links.
#
# These are simulations. Why believe them? Every hardware constant names its source; one number per card, the share of its peak FLOP/s that is reached, is fitted to a few training runs; all other published runs are there to be compared with (memory has 11 of its own, with errors of −34 % to +11 %):
#
# </div>

# %%
from minidist.plan.validate import validate

rows = [row for row in validate() if "memory" not in row["source"]]      # speeds
errors = sorted(abs(row["error"]) for row in rows)
print(f"{len(rows)} published runs: median error {errors[len(errors) // 2]:.0%}, largest {errors[-1]:.0%}")
for source in sorted({row["source"] for row in rows}):
    mine = [row for row in rows if row["source"] == source]
    print(f"{source:>26}: {len(mine):>2} runs, errors {min(r['error'] for r in mine):+.0%} to {max(r['error'] for r in mine):+.0%}")

# %% [markdown]
# <div lang="zh">
#
# 还有几样是模拟器不知道、到了集群上会遇到的：
#
# | 会遇到的 | 样子 | 怎么办 |
# |---|---|---|
# | 掉队者 | 一张卡降频，所有卡一起慢 | 比较各 rank 的计算时间，换掉那台机器（2.2） |
# | 显存碎片 | 还有 5 GB 却报内存不足 | `PYTORCH_ALLOC_CONF=expandable_segments:True`（旧版叫 `PYTORCH_CUDA_ALLOC_CONF`） |
# | 数据读取 | GPU 利用率锯齿状 | 多几个 worker，预取，先量一量不训练只读数据有多快 |
# | bf16 | 损失与 fp32 差在千分之几 | 主副本和归约用 fp32（5.2），别拿 1e-7 的标准去比 |
# | 启动慢 | 几千个 rank 建组要几分钟 | 先看碰头地点（rendezvous）和 DNS，再去调 NCCL |
# | 静默错误 | 损失突然跳一下，没有报错 | 记录梯度范数，定期检查副本一致（2.1），从前一个检查点重来 |
#
# </div>
#
# <div lang="en">
#
# And some things that a simulator does not know and a cluster will show you:
#
# | you meet | it looks like | what to do |
# |---|---|---|
# | stragglers | one card throttles, all slow down together | compare compute times of the ranks, replace that machine (2.2) |
# | fragmentation | out of memory with 5 GB left | `PYTORCH_ALLOC_CONF=expandable_segments:True` (formerly `PYTORCH_CUDA_ALLOC_CONF`) |
# | data loading | saw-toothed GPU utilisation | more workers, prefetching; first time reading without training |
# | bf16 | losses differ from fp32 by some per mille | masters and reductions in fp32 (5.2), and no 1e-7 in comparisons |
# | slow start | thousands of ranks need minutes to form groups | look at the rendezvous and DNS before tuning NCCL |
# | silent errors | the loss jumps once, and nothing complains | record gradient norms, check now and then that replicas agree (2.1), go back one checkpoint |
#
# </div>

# %% [markdown]
# ## 小结 | Summary

# %% [markdown]
# <div lang="zh">
#
# - torchrun 只启动一样的进程并告诉它们各是谁；同一份代码在笔记本和 torchrun 下逐位相同。
# - `RANK` 是全局的，`LOCAL_RANK` 选 GPU；用 `python` 启动会得到一个只有自己的世界。
# - 挂起的地方不是出错的地方：看每个 rank 最近的通信序列从哪里开始不同。
# - 节点之间的互连慢十倍：HYBRID_SHARD 只让分片跨过去；张量并行留在节点内，流水线可以跨节点。
# - 检查点按参数名和范围存，与策略和 rank 数无关；先写旁边再改名；存的间隔 $\sqrt{2\delta M}$。
# - 杀掉一个进程，曲线逐位不变：batch 由步数决定，状态全部还原。
# - 字节数、模型状态的内存、损失曲线基本可以照搬（bf16 和显存碎片除外），时间要看“发一个字节能算多少次”。
#
# **延伸阅读**：PyTorch 文档 *torchrun (Elastic Launch)*、*Distributed Checkpoint*；NVIDIA *NCCL User Guide*（环境变量）与 `nccl-tests` 的 *PERFORMANCE.md*（总线带宽）；Zhao et al. 2023, *PyTorch FSDP*，3.2.2（HYBRID_SHARD）；Grattafiori et al. 2024, *The Llama 3 Herd of Models*，3.3.4（故障）；Young 1974, *A First Order Approximation to the Optimum Checkpoint Interval*。
#
# **全书到此结束**。回头做做 `exercises/`，再打开 `minidist/parallel/` 从头读一遍：现在每一行都该认得了。
#
# </div>
#
# <div lang="en">
#
# - torchrun only starts identical processes and tells each who it is; the same code gives the same bits in the notebook and under torchrun.
# - `RANK` is global, `LOCAL_RANK` chooses the GPU; started with `python` you get a world of one.
# - Where it hangs is not where it went wrong: look where the ranks' sequences of collectives part.
# - Links between nodes are ten times slower: HYBRID_SHARD lets only shards across; tensor parallel stays inside, pipelines may cross.
# - Checkpoints go by parameter name and range, independent of strategy and number of ranks; written aside, then renamed; every $\sqrt{2\delta M}$ seconds.
# - Kill a process, and the curve has the same bits: batches follow from the step, all state is restored.
# - Bytes, the memory of model states and loss curves carry over by and large (bf16 and fragmentation aside); time depends on how much can be computed while a byte is sent.
#
# **Further reading**: PyTorch's documentation of *torchrun (Elastic Launch)* and *Distributed Checkpoint*; NVIDIA's *NCCL User Guide* (environment variables) and *PERFORMANCE.md* of `nccl-tests` (bus bandwidth); Zhao et al. 2023, *PyTorch FSDP*, 3.2.2 (HYBRID_SHARD); Grattafiori et al. 2024, *The Llama 3 Herd of Models*, 3.3.4 (failures); Young 1974, *A First Order Approximation to the Optimum Checkpoint Interval*.
#
# **This is the end of the course.** Go back to `exercises/`, then open `minidist/parallel/` and read it from the start: every line should look familiar now.
#
# </div>
