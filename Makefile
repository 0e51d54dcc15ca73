# `make demo` and `make test` are all a newcomer needs; both set up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# a step of about 0.2 s on 4 workers that share 2 cores
MOE_SIZES := --steps 1000000 --dim 64 --hidden 128 --context 32

export OMP_NUM_THREADS ?= 1
# without bytecode each of a job's processes would compile what it imports again
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install test demo chaos lint types bench-recovery bench-redone bench-move bench-rebalance bench-pool bench-pool-scale bench-waf bench-pace bench-ladder bench-faults bench-peers bench-precision \
	bench-outage bench-snapshots bench-exact bench-step bench-loaders bench-abandon \
	bench-outer bench-reduction bench-detect bench-gpu gpu-check bench-moe bench-moe-recovery bench-planning bench-placement bench-balance bench-sparing \
	bench-layer bench-layer-time bench-levels bench-worlds bench-spot bench-strangers bench-agreement bench-layouts bench-trees bench-layouts-peer bench-control-plane bench-gallery bench-fleet figures-lazarus figures-unicron \
	fuzz every-write mutants explore soak

# torchtitan and what its trainer imports, alone: what it asks for beside that has no release that fits transformers' hub
TITAN := torchtitan spmd_types tyro docstring_parser typeguard torchdata dill tensorboard absl-py protobuf

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps $(TITAN) || \
		echo "no torchtitan: its tests are skipped" >&2
	@touch $@

# (first: each of pytest's processes would compile all that it imports, as none has by then)
test: install
	@$(BIN)/python -m compileall -q -j 0 src
	$(BIN)/python -m pytest -n 3 --dist loadgroup --max-worker-restart 0 -m "not soak"

demo: install
	$(BIN)/python -m holdfast demo --out out

# fresh fault schedules for SECONDS on all cores; what fails is printed as a command that replays it
SECONDS ?= 60
fuzz: install
	$(BIN)/python -m tests.simulation fuzz --seconds $(SECONDS)

# the coordinator killed at every single write of SCHEDULES schedules: every single failure, then random ones
SCHEDULES ?= 200
every-write: install
	$(BIN)/python -m tests.simulation writes --schedules $(SCHEDULES)

# wrong lines put into coordination, one at a time: each must be caught by schedules or by unit tests
mutants: install
	$(BIN)/python tests/mutants/run_mutants.py

# all that takes too long for `make test`: 100,000 fault schedules, crashes at every write, mutants, repeated integration
# tests. Writes benchmarks/results/soak.txt
soak: install
	$(BIN)/python tests/soak/run_soak.py $(SOAK)

# all states of the protocol of planned moves: a minute or two; with EXPLORE=--deep hours
EXPLORE ?=
explore: install
	$(BIN)/python tests/exploration/run_exploration.py $(EXPLORE)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/pyright

# what the loss and the arrival of a node cost, and beside it what torchrun's restart costs
bench-recovery: install
	$(BIN)/python benchmarks/recovery.py
	$(BIN)/python benchmarks/peers.py

# what is computed again after 40 kills
bench-redone: install
	$(BIN)/python benchmarks/redone.py

# what it costs that a node's part moves to a standby, planned or after a kill, in time and in memory, beside what plain
# torch takes for it, and whether moves leave anything behind; that a node leaves, and that one is slow, beside what others
# do about it. One table at the end of all that is asked; about an hour and a half
bench-move: install
	$(BIN)/python benchmarks/asked.py benchmarks/move.py "benchmarks/move_memory.py --moves 100" benchmarks/stragglers.py

# what it costs the steps around it that experts move to where the tokens are
bench-rebalance: install
	$(BIN)/python benchmarks/rebalance.py

# what three jobs on eight nodes achieve by the pool's plan, beside shrinking the hit job alone and the simulator: 20 min
bench-waf: install
	$(BIN)/python benchmarks/pool_waf.py

# jobs on a pool of this machine's nodes: ten minutes of failures, moves, losses, 20 servers, an etcd that is away
bench-pool: install
	$(BIN)/python benchmarks/pool.py

# how long steps take with numbers of nodes that were not measured, as predicted and as they then do: four minutes
bench-pace: install
	$(BIN)/python benchmarks/pace.py

# what a pool's server costs with 1,024 nodes and 32 jobs: fake nodes, no training
bench-pool-scale: install
	$(BIN)/python benchmarks/pool_scale.py

# what a killed process costs on a node that lives, with its rank held and without, and a sample that always raises
bench-ladder: install
	$(BIN)/python benchmarks/ladder.py

# faults of all kinds in one job of four nodes, audited: nothing lost, each taken for what it is; about 20 minutes
FAULTS ?= 200
MINUTES ?= 20
SEED ?= 1
chaos: install
	$(BIN)/python benchmarks/chaos.py --faults $(FAULTS) --minutes $(MINUTES) --seed $(SEED)

# the same, sixty faults
bench-faults: install
	$(BIN)/python benchmarks/chaos.py --faults 60

# torchrun alone
bench-peers: install
	$(BIN)/python benchmarks/peers.py

# the same for a Mixture-of-Experts model: 4 layers, 8 experts, 6 slots a node, f = 2; then with 8 slots down to one
# node and back to six
bench-moe-recovery: install
	$(BIN)/python benchmarks/recovery.py --script examples/moe_gpt.py -- $(MOE_SIZES)
	$(BIN)/python benchmarks/churn.py -- $(MOE_SIZES)

# the loss of disturbed runs against undisturbed ones: dense, and with experts (recorded assignments, learned gate)
bench-precision: install
	$(BIN)/python benchmarks/precision.py

# the gallery's scripts with a kill and a join, against themselves undisturbed and their plain twins; changed lines
bench-gallery: install
	$(BIN)/python benchmarks/gallery.py

# how soon failures are seen, and the right node named, beside Unicron's Table 2; false alarms; what watching costs
bench-detect: install
	$(BIN)/python benchmarks/detect.py

# a killed coordinator, a paused node, a paused coordinator
bench-outage: install
	$(BIN)/python benchmarks/outage.py

# BatchNorm through six kills in every bit as on one process; each of 500 steps' logged values once through ten faults
bench-exact: install
	$(BIN)/python benchmarks/exact.py

# what snapshots in the nodes' memory cost while nothing fails (how long apply waits, seconds per snapshot), and
# checkpoints at the period that a job chooses
bench-snapshots: install
	$(BIN)/python benchmarks/snapshots.py
	$(BIN)/python benchmarks/snapshots.py --checkpoints --steps 600 --rounds 2

# step time against DDP, in the same processes
bench-step: install
	$(BIN)/python benchmarks/step_time.py

# an FSDP2 step on groups that can be exchanged, against torch's own gloo group, in turns in the same processes
bench-outer: install
	$(BIN)/python benchmarks/outer_group.py
	$(BIN)/python benchmarks/outer_group.py --ranks 4
	$(BIN)/python benchmarks/outer_group.py --layers 4 --dim 64

# data that take time: a step with loader workers against its compute alone, and a kill against one without
bench-loaders: install
	$(BIN)/python benchmarks/loaders.py

# 200 forced abandonments per kind of collective at 4 and 8 ranks, 50 reconfigurations: about 9 minutes
bench-abandon: install
	$(BIN)/python benchmarks/abandon.py

# the reduction against gloo's all-reduce
bench-reduction: install
	$(BIN)/python benchmarks/reduction.py

# the commit operation and the reduction, all ranks at once and level by level: 8 to 64 ranks
bench-levels: install
	$(BIN)/python benchmarks/levels.py

# real jobs of 4 to 64 ranks in network namespaces: kills and joins, connections, memory, by the world's size
bench-worlds: install
	$(BIN)/python benchmarks/worlds.py

# step time of the MoE layer against plain static expert parallelism, in the same processes
bench-moe: install
	$(BIN)/python benchmarks/moe_step.py

# one MoE layer against plain grouped_mm, processor time, in turns
bench-layer-time: install
	$(BIN)/python benchmarks/layer_time.py

# token dispatch on a GPU: kernels beside a device copy, one layer beside plain ones
bench-gpu: install
	$(BIN)/python benchmarks/dispatch_gpu.py

# Check holdfast on a GPU, in at most eight minutes (docs/gpu.md). GPU_CHECK: its options.
GPU_CHECK ?=
gpu-check: install
	$(BIN)/python -m benchmarks.gpu_check $(GPU_CHECK)

# the speed of planning: placement for 128 nodes, the dispatch schedule for 1,024 ranks
bench-planning: install
	$(BIN)/python benchmarks/planning.py

# recovery probabilities on recorded loads, and small cases against brute force
bench-placement: install
	$(BIN)/python benchmarks/recovery_probability.py

# what placements survive and how evenly nodes work, every strategy and EPLB side by side
bench-balance: install
	$(BIN)/python benchmarks/balance.py

# the sparing planner: speed, and the paper's figures beside ours
bench-sparing: install
	$(BIN)/python benchmarks/sparing.py

# MoE layer throughput as one expert gets ever more of the tokens, against static experts; emulated accelerator
bench-layer: install
	$(BIN)/python benchmarks/layer_throughput.py

# samples trained through a spot trace and through single failures, against restarts and static experts: about an hour and a half
bench-spot: install
	$(BIN)/python benchmarks/spot.py

# a thousand strangers at the coordinator's port beside a training job, in turns with nobody
bench-strangers: install
	$(BIN)/python benchmarks/strangers.py

# what it costs that the places of a unit agree on a micro-batch: half a minute
bench-agreement: install
	$(BIN)/python benchmarks/agreement.py

# replicas over several workers of a node: kills, arrivals, exactness, another layout, memory
bench-layouts: install
	$(BIN)/python benchmarks/layouts.py

# a step of a job without a layout against another tree of this project: make bench-trees TREE=../other
bench-trees: install
	$(BIN)/python benchmarks/two_trees.py $(TREE)

# a replica over two workers is killed, here and with torchft's HSDP in turns, where torchft is installed
bench-layouts-peer: install
	$(BIN)/python benchmarks/layouts_peer.py

# what the control plane costs, and how fast it reacts, from 16 to 1,024 nodes x 8 workers: fake nodes, no training
bench-control-plane: install
	$(BIN)/python benchmarks/control_plane.py

# the figures of the Lazarus paper beside ours (docs/lazarus.md), pictures in out/lazarus; RECORDINGS: their folder
FIGURES := figure_2 figures_4_5 figure_8 table_2 figures_6_7 figures_9_11 figures_12_14 figure_13 figure_10a figures_measured
figures-lazarus: install
	$(foreach figure,$(FIGURES),$(BIN)/python benchmarks/lazarus/$(figure).py $(if $(RECORDINGS),--data $(RECORDINGS)) &&) true

# eight weeks of pools of 1,024 and 4,096 nodes with 32 jobs, simulated: how long that takes
bench-fleet: install
	$(BIN)/python benchmarks/fleet_scale.py

# Unicron's figures and tables beside ours (docs/fleet.md), pictures in out/unicron; DETECTED: what bench-detect
# printed, where that of before is not to count
figures-unicron: install
	$(BIN)/python benchmarks/unicron/figure_3.py
	$(BIN)/python benchmarks/unicron/figure_8_redone.py
	$(BIN)/python benchmarks/unicron/figure_11.py
	$(BIN)/python benchmarks/unicron/figures_9_10.py
	$(BIN)/python benchmarks/unicron/tables_2_3.py $(if $(DETECTED),--detected $(DETECTED))
