/*
 * The part of DLPack 1.3's binary interface that lohan uses, declared here: the C exchange table
 * that torch 2.11 and later attach to torch.Tensor as the capsule "dlpack_exchange_api". Plain
 * data; nothing here is compiled against torch.
 *
 * The asserts pin sizes and offsets; tests/py/test_dlpack_abi.py compares them with the header that
 * torch ships.
 */
#ifndef LH_PY_DLPACK_ABI_H
#define LH_PY_DLPACK_ABI_H

#include <stddef.h>
#include <stdint.h>

#define LHPY_DL_VERSION_MAJOR 1
#define LHPY_DL_VERSION_MINOR 3
#define LHPY_DL_DEVICE_CPU 1
#define LHPY_DL_DEVICE_CUDA 2
#define LHPY_DL_CODE_INT 0
#define LHPY_DL_CODE_UINT 1
#define LHPY_DL_CODE_FLOAT 2
#define LHPY_DL_CODE_BFLOAT 4

struct lhpy_dl_version {
    uint32_t major;
    uint32_t minor;
};

struct lhpy_dl_type {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
};

struct lhpy_dl_tensor {
    void *data;
    int32_t device_type;
    int32_t device_id;
    int32_t ndim;
    struct lhpy_dl_type dtype;
    int64_t *shape;
    int64_t *strides; /* in elements */
    uint64_t byte_offset;
};

struct lhpy_dl_managed {
    struct lhpy_dl_version version;
    void *manager_ctx;
    void (*deleter)(struct lhpy_dl_managed *self);
    uint64_t flags;
    struct lhpy_dl_tensor tensor;
};

struct lhpy_dl_exchange {
    struct lhpy_dl_version version;
    struct lhpy_dl_exchange *prev_api;
    void *managed_tensor_allocator;
    int (*managed_from_object)(void *object, struct lhpy_dl_managed **out);
    int (*managed_to_object)(struct lhpy_dl_managed *tensor, void **object_out);
    int (*tensor_from_object)(void *object, struct lhpy_dl_tensor *out);
    int (*current_work_stream)(int32_t device_type, int32_t device_id, void **stream_out);
};

_Static_assert(sizeof(struct lhpy_dl_tensor) == 48, "DLTensor");
_Static_assert(offsetof(struct lhpy_dl_tensor, shape) == 24, "DLTensor.shape");
_Static_assert(sizeof(struct lhpy_dl_managed) == 80, "DLManagedTensorVersioned");
_Static_assert(offsetof(struct lhpy_dl_managed, tensor) == 32,
               "DLManagedTensorVersioned.dl_tensor");
_Static_assert(sizeof(struct lhpy_dl_exchange) == 56, "DLPackExchangeAPI");

#endif
