"""Which samples and which randomness a micro-batch has, and how they are fetched.

All follow from (seed, step, micro-batch), never from the world: `SampleOrder.indices` gives the samples,
`seed_micro_batch` the random state. `job_data` turns the script's data into a `JobData`: a data set with numbers, a
`Stream`, a data set by step, or streams whose position is part of the training state (`StreamedData`).
`MicroBatchLoader.expect` announces the next micro-batches, `MicroBatchLoader.load` returns one on the device. With
loader workers, `LoaderPool` fetches them in advance.
"""
