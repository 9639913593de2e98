/*
 * A late device for torch: device type "cuda" of a torch that was built without CUDA. Its memory is
 * main memory, its operations are torch's own CPU kernels, and nothing is computed when an
 * operation is called. Like a GPU's kernel, an operation gets raw addresses, and is enqueued on a
 * stream of the driver in driver.c, whose threads execute it later.
 *
 *      host:  meta kernel -> form of the result -> cuLaunchHostFunc     (any thread of torch's)
 *      late:  CPU kernel on the addresses                               (a thread of the driver's)
 *
 * The device's memory is mapped twice. Tensors have addresses in the first mapping, which nobody
 * may access, so that CPU code that touches a tensor of the device ends the process. The driver's
 * threads use the second one. Freed memory is the next tensor's at once, as with CUDA's caching
 * allocator, and is overwritten with NaNs in the order of the stream that it was allocated on.
 *
 * Each wait of the host is reported with the name of its reason (late_hook in device.cpp).
 */
#ifndef LAG_LATE_H
#define LAG_LATE_H

#include <ATen/core/Tensor.h>

#include <functional>

#include "driver.h"

namespace late
{

constexpr auto DEVICE = c10::DeviceType::CUDA;

using Work = std::function<void()>;

/* Enqueue an operation on this thread's current stream. */
void launch(Work work);

/* The host waits for this thread's current stream; the reason is reported. */
void wait(const char *reason);

/* The host waits for all streams. */
void wait_for_all();

/* Return where the driver's threads find what is at an address of the device. */
void *seen(void *address);

/* Return the memory for a new tensor. */
c10::Allocator *allocator();

/* The tensor's memory is reused only after what this stream has been given until it is freed. */
void use(const at::Tensor &tensor, c10::Stream stream);

} // namespace late

#endif
