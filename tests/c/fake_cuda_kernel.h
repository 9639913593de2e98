/* Part of fake_cuda.c, which includes it: modules of kernels, and their launches. */
#ifndef FAKE_CUDA_KERNEL_H
#define FAKE_CUDA_KERNEL_H

static unsigned fake_module_load(struct CUmod_st **module, const void *image)
{
    unsigned result = begin(true);
    if (result == 0 && strcmp(image, fake_cuda_image) != 0)
        result = LH_CUDA_INVALID_IMAGE;
    module_only.load_count += result == 0;
    *module = result == 0 ? &module_only : (struct CUmod_st *)-1;
    return unlock(result);
}

static unsigned fake_module_unload(struct CUmod_st *module)
{
    lock();
    LH_CHECK(pushed_count > 0 && module == &module_only && module->load_count > 0);
    LH_CHECK(launch_count == 0 || module->load_count > 1); /* none of its kernels is running */
    module->load_count--;
    return unlock(0);
}

static unsigned fake_module_function(struct CUfunc_st **function, struct CUmod_st *module,
                                     const char *name)
{
    unsigned result = begin(true);
    LH_CHECK(module == &module_only && module->load_count > 0);
    if (result == 0 && strcmp(name, zo_batch.name) != 0)
        result = LH_CUDA_NOT_FOUND;
    *function = result == 0 ? &zo_batch : (struct CUfunc_st *)-1;
    return unlock(result);
}

static unsigned fake_launch(struct CUfunc_st *function, unsigned groups_x, unsigned groups_y,
                            unsigned groups_z, unsigned threads_x, unsigned threads_y,
                            unsigned threads_z, unsigned shared_bytes, struct CUstream_st *stream,
                            void **arguments, void **extra)
{
    unsigned result = begin(true);
    LH_CHECK(function == &zo_batch && module_only.load_count > 0 && !extra && shared_bytes == 0);
    LH_CHECK(groups_y == 1 && groups_z == 1 && threads_y == 1 && threads_z == 1);
    if (result == 0 && (groups_x == 0 || groups_x > INT32_MAX || threads_x == 0 ||
                        threads_x > LH_ZO_BATCH_THREADS))
        result = INVALID_VALUE;
    struct op op = {.kind = OP_LAUNCH, .thread_count = (uint64_t)groups_x * threads_x};
    if (result == 0) {
        op.batch = malloc(sizeof(*op.batch));
        LH_CHECK(op.batch);
        memcpy(op.batch, arguments[0], sizeof(*op.batch));
        launch_count++;
    }
    return issue(result, stream, op);
}

#endif
