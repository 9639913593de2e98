/* Calls of CUDA's driver, and what their errors mean. */
#include "dev/cuda_private.h"

#include <stdarg.h>
#include <stdio.h>

/* Advice about an error of the driver, or "". */
static const char *way_out(unsigned result)
{
    if (result == LH_CUDA_OUT_OF_MEMORY)
        return "; free memory of the GPU or of the host (nvidia-smi shows who holds it)";
    if (result == LH_CUDA_NO_DEVICE || result == LH_CUDA_INVALID_DEVICE)
        return "; see nvidia-smi and CUDA_VISIBLE_DEVICES, or device='cpu'";
    if (result == LH_CUDA_INVALID_IMAGE || result == LH_CUDA_NO_BINARY ||
        result == LH_CUDA_UNSUPPORTED_PTX)
        return "; the kernels were compiled for other GPUs or newer drivers: build lohan with the "
               "CUDA toolkit of this driver, or device='cpu'";
    if (result == LH_CUDA_ILLEGAL_ADDRESS ||
        (result >= LH_CUDA_HARDWARE_STACK_ERROR && result <= LH_CUDA_LAUNCH_FAILED))
        return "; an earlier kernel may have caused it: CUDA_LAUNCH_BLOCKING=1 shows which one";
    return "";
}

static int code_of(unsigned result)
{
    if (result == LH_CUDA_OUT_OF_MEMORY)
        return -ENOMEM;
    if (result == LH_CUDA_NO_DEVICE || result == LH_CUDA_INVALID_DEVICE)
        return -ENODEV;
    return -EIO;
}

int lh_cuda_judge(const struct lh_cuda *cuda, unsigned result, struct lh_error *err,
                  const char *format, ...)
{
    if (result == 0)
        return 0;
    char call[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(call, sizeof(call), format, arguments);
    va_end(arguments);
    const char *name = NULL;
    const char *text = NULL;
    if (cuda->calls.error_name(result, &name) != 0 || !name)
        name = "an error without a name";
    if (cuda->calls.error_text(result, &text) != 0 || !text)
        text = "the driver gives no description";
    int code = lh_error_set(err, code_of(result), "%s: %s (%u: %s)%s", call, name, result, text,
                            way_out(result));
    if (err)
        err->native = (int64_t)result;
    return code;
}

int lh_cuda_enter(const struct lh_cuda *cuda, struct lh_error *err)
{
    return lh_cuda_judge(cuda, cuda->calls.context_push(cuda->context), err, "cuCtxPushCurrent");
}

void lh_cuda_leave(const struct lh_cuda *cuda)
{
    struct CUctx_st *context = NULL;
    /* Ignore errors (the process is exiting): the next call will report them, too. */
    cuda->calls.context_pop(&context);
}

int lh_cuda_event_create(const struct lh_cuda *cuda, struct CUevent_st **event_out, unsigned flags,
                         struct lh_error *err)
{
    unsigned result = cuda->calls.event_create(event_out, flags);
    if (result != 0)
        *event_out = NULL;
    return lh_cuda_judge(cuda, result, err, "cuEventCreate");
}

int lh_cuda_stream_wait(const struct lh_cuda *cuda, struct CUstream_st *stream,
                        struct CUevent_st *event, struct lh_error *err)
{
    return lh_cuda_judge(cuda, cuda->calls.stream_wait(stream, event, 0), err,
                         "cuStreamWaitEvent of stream %p", (void *)stream);
}

int lh_cuda_event_record(const struct lh_cuda *cuda, struct CUevent_st *event,
                         struct CUstream_st *stream, struct lh_error *err)
{
    return lh_cuda_judge(cuda, cuda->calls.event_record(event, stream), err,
                         "cuEventRecord on stream %p", (void *)stream);
}

void lh_cuda_event_destroy(const struct lh_cuda *cuda, struct CUevent_st *event)
{
    if (event)
        cuda->calls.event_destroy(event);
}

unsigned lh_cuda_elapsed(const struct lh_cuda *cuda, struct CUevent_st *begun,
                         struct CUevent_st *ended, uint64_t *ns_out)
{
    float ms = 0;
    unsigned result = cuda->calls.event_elapsed(&ms, begun, ended);
    *ns_out = result == 0 && ms > 0 ? (uint64_t)((double)ms * 1e6) : 0;
    return result;
}
