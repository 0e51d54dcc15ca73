"""The samples and the randomness of each micro-batch, and how micro-batches are fetched.

Both follow from (seed, step, micro-batch), never from the number of workers: `SampleOrder.indices` gives the samples,
`seed_micro_batch` the random state. `make_job_data` turns the script's data into a `JobData`: a data set with indices,
a `Stream`, a data set by step, or streams with positions in the training state (`StreamedData`).
`MicroBatchLoader.expect` announces the next micro-batches, `MicroBatchLoader.load` returns one on the device. With
loader workers, `LoaderPool` fetches them in advance.
"""
