/* The late device: random numbers and operations. See late.h. */
#include "late.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <stdexcept>
#include <unordered_set>

namespace
{

using Stack = torch::jit::Stack;
using Change = std::function<at::Tensor(const at::Tensor &)>;

constexpr auto LATE = late::DEVICE;

/* --- random numbers: the seed and the offset are read when an operation is enqueued --- */

struct LateGenerator final : c10::GeneratorImpl {
    LateGenerator()
        : GeneratorImpl(c10::Device(LATE, 0), c10::DispatchKeySet(c10::DispatchKey::CUDA))
    {
    }
    void set_current_seed(uint64_t value) override
    {
        from = value;
        offset = 0;
    }
    void set_offset(uint64_t value) override
    {
        offset = value;
    }
    uint64_t get_offset() const override
    {
        return offset;
    }
    uint64_t current_seed() const override
    {
        return from;
    }
    uint64_t seed() override
    {
        set_current_seed(c10::detail::getNonDeterministicRandom(true));
        return from;
    }
    void set_state(const c10::TensorImpl &state) override
    {
        const auto *words = static_cast<const uint64_t *>(state.data());
        from = words[0];
        offset = words[1];
    }
    c10::intrusive_ptr<c10::TensorImpl> get_state() const override
    {
        auto state = at::empty({2 * sizeof(uint64_t)}, at::kByte);
        auto *words = static_cast<uint64_t *>(state.mutable_data_ptr());
        words[0] = from;
        words[1] = offset;
        return state.getIntrusivePtr();
    }
    LateGenerator *clone_impl() const override
    {
        auto *made = new LateGenerator;
        made->from = from;
        made->offset = offset;
        return made;
    }
    uint64_t from = c10::default_rng_seed_val, offset = 0;
};

const at::Generator &default_generator()
{
    static const auto generator = at::make_generator<LateGenerator>();
    return generator;
}

struct Hooks final : at::CUDAHooksInterface {
    explicit Hooks(at::CUDAHooksArgs)
    {
    }
    void init() const override
    {
    }
    bool isBuilt() const override
    {
        return true;
    }
    bool isAvailable() const override
    {
        return true;
    }
    bool hasCUDA() const override
    {
        return true;
    }
    bool hasPrimaryContext(c10::DeviceIndex) const override
    {
        return true;
    }
    c10::DeviceIndex deviceCount() const override
    {
        return 1;
    }
    int getNumGPUs() const override
    {
        return 1;
    }
    c10::DeviceIndex current_device() const override
    {
        return 0;
    }
    c10::DeviceIndex getCurrentDevice() const override
    {
        return 0;
    }
    const at::Generator &getDefaultGenerator(c10::DeviceIndex) const override
    {
        return default_generator();
    }
    at::Generator getNewGenerator(c10::DeviceIndex) const override
    {
        return at::make_generator<LateGenerator>();
    }
    c10::Device getDeviceFromPtr(void *) const override
    {
        return {LATE, 0};
    }
    void deviceSynchronize(c10::DeviceIndex) const override
    {
        late::wait_for_all();
    }
};

/* Return a generator on the CPU for one operation; given or the default one moves on. */
at::Generator next_generator(const std::optional<at::Generator> &given)
{
    const at::Generator &used = given && given->defined() ? *given : default_generator();
    TORCH_CHECK(used.device().type() == LATE, "late: a generator of another device");
    auto *state = used.get<LateGenerator>();
    std::lock_guard<std::mutex> guard(state->mutex_);
    return at::detail::createCPUGenerator(state->from * 0x9e3779b97f4a7c15u + state->offset++);
}

/* --- tensors --- */

bool is_late(const at::Tensor &tensor)
{
    return tensor.defined() && tensor.device().type() == LATE;
}

/* A tensor of the device as a kernel gets it: an address, and no reference to the memory. */
struct Ref {
    void *address = nullptr;
    std::vector<int64_t> sizes, strides;
    at::ScalarType dtype = at::kFloat;

    explicit Ref(const at::Tensor &tensor)
        : sizes(tensor.sizes().vec()), strides(tensor.strides().vec()), dtype(tensor.scalar_type())
    {
        if (tensor.numel() > 0)
            address = late::seen(tensor.mutable_data_ptr());
    }
    at::Tensor tensor() const
    {
        auto options = at::TensorOptions().dtype(dtype);
        return address ? at::from_blob(address, sizes, strides, options)
                       : at::empty_strided(sizes, strides, options);
    }
};

/* --- what needs no kernel ---- */

at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device>, std::optional<bool>)
{
    auto type = c10::scalarTypeToTypeMeta(dtype.value_or(at::get_default_dtype_as_scalartype()));
    size_t bytes = at::detail::computeStorageNbytes(sizes, strides, type.itemsize());
    auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                         late::allocator()->allocate(bytes),
                                                         late::allocator(), true);
    auto tensor = at::detail::make_tensor<c10::TensorImpl>(
        std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA), type);
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
    return tensor;
}

at::Tensor empty_as(const at::Tensor &form)
{
    return empty_strided(form.sizes(), form.strides(), form.scalar_type(), {}, {}, {});
}

at::Tensor empty(c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
                 std::optional<at::MemoryFormat> format)
{
    auto type = dtype.value_or(at::get_default_dtype_as_scalartype());
    return empty_as(at::empty(sizes, at::TensorOptions().dtype(type).device(at::kMeta), format));
}

at::Tensor as_strided(const at::Tensor &self, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                      std::optional<int64_t> offset)
{
    return at::native::as_strided_tensorimpl(self, sizes, strides, offset);
}

at::Tensor &set_storage(at::Tensor &self, at::Storage storage, int64_t offset,
                        c10::IntArrayRef sizes, c10::IntArrayRef strides)
{
    auto *impl = self.unsafeGetTensorImpl();
    impl->set_storage_keep_dtype(std::move(storage));
    impl->set_storage_offset(offset);
    impl->set_sizes_and_strides(sizes, strides);
    return self;
}

const at::Tensor &resize_(const at::Tensor &self, c10::IntArrayRef sizes,
                          std::optional<at::MemoryFormat> format)
{
    auto form = at::empty(sizes, self.options().device(at::kMeta), format);
    auto *impl = self.unsafeGetTensorImpl();
    size_t bytes = at::detail::computeStorageNbytes(sizes, form.strides(), self.element_size(),
                                                    self.storage_offset());
    if (bytes > self.storage().nbytes()) {
        TORCH_CHECK(self.numel() == 0, "late: resize_ of a tensor that has values");
        impl->set_storage_keep_dtype(empty_as(form).storage());
        impl->set_storage_offset(0);
    }
    impl->set_sizes_and_strides(sizes, form.strides());
    return self;
}

void record_stream(at::Tensor &self, at::Stream stream)
{
    late::use(self, stream);
}

int64_t attention_choice(const at::Tensor &, const at::Tensor &, const at::Tensor &,
                         const std::optional<at::Tensor> &, double, bool, std::optional<double>,
                         bool)
{
    return 0; /* the composite of matrix products: sdp::SDPBackend::math */
}

/* --- copies and reads ---- */

/* As in torch for CUDA: a copy between main memory and the device waits, unless it need not. */
at::Tensor &copy_(at::Tensor &self, const at::Tensor &from, bool is_non_blocking)
{
    if (is_late(self) && is_late(from)) {
        late::launch([to = Ref(self), from = Ref(from)] { to.tensor().copy_(from.tensor()); });
    } else if (is_late(self)) {
        late::launch([to = Ref(self), from = from.detach().clone()] { to.tensor().copy_(from); });
        if (!is_non_blocking)
            late::wait("a copy to the device");
    } else {
        at::Tensor made = at::empty_like(self.detach());
        late::launch([made, from = Ref(from)] { at::Tensor(made).copy_(from.tensor()); });
        late::wait("a copy to main memory");
        at::AutoDispatchBelowADInplaceOrView no_autograd;
        self.copy_(made);
    }
    return self;
}

at::Scalar local_scalar(const at::Tensor &self)
{
    late::wait("a value");
    return Ref(self).tensor().item();
}

/* --- everything else ---- */

/* Replace every tensor of an argument or a result. */
c10::IValue changed(const c10::IValue &value, const Change &change, c10::Device device)
{
    if (value.isTensor())
        return value.toTensor().defined() ? c10::IValue(change(value.toTensor())) : value;
    if (value.isTensorList()) {
        c10::List<at::Tensor> out;
        for (const at::Tensor &tensor : value.toTensorVector())
            out.push_back(change(tensor));
        return out;
    }
    if (value.isList()) {
        c10::List<std::optional<at::Tensor>> out;
        bool has_tensors = false;
        for (const c10::IValue &item : value.toListRef()) {
            if (!item.isTensor() && !item.isNone())
                return value;
            has_tensors |= item.isTensor();
            bool is_defined = item.isTensor() && item.toTensor().defined();
            out.push_back(is_defined ? std::optional<at::Tensor>(change(item.toTensor()))
                                     : std::nullopt);
        }
        return has_tensors ? c10::IValue(out) : value;
    }
    if (value.isDevice() && value.toDevice().type() == LATE)
        return device;
    return value;
}

Stack changed_all(const Stack &values, const Change &change, c10::Device device)
{
    Stack out;
    for (const c10::IValue &value : values)
        out.push_back(changed(value, change, device));
    return out;
}

bool is_written(const c10::Argument &argument)
{
    return argument.alias_info() && argument.alias_info()->isWrite();
}

/* Of main memory, an operation takes only numbers, and indices. */
void check_host(const c10::FunctionSchema &schema, const at::Tensor &tensor)
{
    static const std::unordered_set<std::string> indexing{"aten::index", "aten::index_put_",
                                                          "aten::_index_put_impl_"};
    bool is_taken =
        tensor.device().is_cpu() && (tensor.dim() == 0 || indexing.count(schema.name()));
    TORCH_CHECK(is_taken, "Expected all tensors to be on the same device: ", schema.name(),
                " got a tensor on ", tensor.device(), " and others on the late device");
}

/* Return a copy: values in main memory are read when the operation is called. */
at::Tensor taken(const at::Tensor &tensor)
{
    at::Tensor made = tensor.detach().clone();
    made.unsafeGetTensorImpl()->set_wrapped_number(
        tensor.unsafeGetTensorImpl()->is_wrapped_number());
    return made;
}

/* A call of an operation, from its arguments to what its execution needs. */
struct Call {
    c10::OperatorHandle op;
    Stack arguments;
    Stack outs;                    /* what the caller gets */
    std::vector<at::Tensor> hosts; /* arguments that are not on the device */
    std::vector<Ref> refs;
    std::vector<bool> are_late; /* for each tensor among the arguments: in refs, or in hosts */
    std::vector<Ref> made;      /* new tensors among the results */
    Stack form;                 /* the arguments with empty tensors */
    std::optional<at::Generator> generator;

    Call(const c10::OperatorHandle &handle, Stack given) : op(handle), arguments(std::move(given))
    {
    }
    const c10::FunctionSchema &schema() const
    {
        return op.schema();
    }
    Stack metas() const;
    void take_results(const Stack &results);
    void take_arguments();
    void run() const;
};

/* Run the meta kernel: what is the form of the results? */
Stack Call::metas() const
{
    Change change = [this](const at::Tensor &tensor) {
        if (!is_late(tensor)) {
            check_host(schema(), tensor);
            return tensor;
        }
        return at::empty_strided(tensor.sizes(), tensor.strides(),
                                 tensor.options().device(at::kMeta));
    };
    Stack stack = changed_all(arguments, change, c10::Device(at::kMeta)), inputs = stack;
    op.callBoxed(&stack);
    for (size_t i = 0; i < arguments.size(); i++) { /* a result that was given, and grows */
        if (!is_written(schema().arguments()[i]) || !arguments[i].isTensor())
            continue;
        const at::Tensor &form = inputs[i].toTensor(), &own = arguments[i].toTensor();
        if (is_late(own) && form.sizes() != own.sizes())
            resize_(own, form.sizes(), std::nullopt);
    }
    return stack;
}

/* results: tensors with the form of the results. */
void Call::take_results(const Stack &results)
{
    /* The CPU's kernel has statistics in the dtype of the input, CUDA's in fp32. */
    bool has_statistics = schema().name() == "aten::native_layer_norm";
    for (size_t i = 0; i < results.size(); i++) {
        const auto *alias = schema().returns()[i].alias_info();
        size_t k = 0;
        while (alias && k < arguments.size() &&
               !(is_written(schema().arguments()[k]) &&
                 schema().arguments()[k].alias_info()->beforeSet() == alias->beforeSet()))
            k++;
        TORCH_CHECK(k < arguments.size() || !alias, "late: ", schema().name(), " returns a view");
        if (alias) {
            outs.push_back(arguments[k]);
            continue;
        }
        outs.push_back(changed(
            results[i],
            [&](const at::Tensor &form) {
                auto dtype = (has_statistics ? arguments[0].toTensor() : form).scalar_type();
                at::Tensor tensor = empty_as(form.to(dtype));
                made.emplace_back(tensor);
                return tensor;
            },
            c10::Device(LATE, 0)));
    }
}

void Call::take_arguments()
{
    bool is_random = op.hasTag(at::Tag::nondeterministic_seeded);
    bool has_generator = false;
    for (size_t i = 0; i < arguments.size(); i++) {
        bool is_generator = schema().arguments()[i].type()->str().find("Generator") == 0;
        if (!is_random || !is_generator)
            continue;
        auto given =
            arguments[i].isNone() ? std::nullopt : std::optional(arguments[i].toGenerator());
        arguments[i] = next_generator(given);
        has_generator = true;
    }
    TORCH_CHECK(!is_random || has_generator, "late: ", schema().name(), " takes no generator");
    Change change = [this](const at::Tensor &tensor) {
        are_late.push_back(is_late(tensor));
        if (is_late(tensor))
            refs.emplace_back(tensor);
        else
            hosts.push_back(taken(tensor));
        return at::empty({0});
    };
    form = changed_all(arguments, change, c10::Device(at::kCPU));
    arguments.clear(); /* nothing keeps the memory */
}

/* On the device: run the CPU's kernel, and put new results where they are expected. */
void Call::run() const
{
    size_t at = 0, ref = 0, host = 0, put = 0;
    Change change = [&](const at::Tensor &) {
        return are_late[at++] ? refs[ref++].tensor() : hosts[host++];
    };
    Stack stack = changed_all(form, change, c10::Device(at::kCPU));
    op.callBoxed(&stack);
    Change keep = [&](const at::Tensor &result) {
        at::Tensor target = made[put++].tensor();
        TORCH_CHECK(target.sizes() == result.sizes(), schema().name(),
                    ": the meta kernel and the CPU's have results of other sizes");
        return target.copy_(result);
    };
    for (size_t i = 0; i < stack.size(); i++) {
        if (!schema().returns()[i].alias_info())
            changed(stack[i], keep, c10::Device(at::kCPU));
    }
}

/* An operation whose results' form depends on values: wait, and compute at once. */
void run_waiting(Call &call)
{
    late::wait(call.schema().name().c_str());
    Change change = [](const at::Tensor &tensor) {
        return is_late(tensor) ? Ref(tensor).tensor() : tensor;
    };
    Stack stack = changed_all(call.arguments, change, c10::Device(at::kCPU));
    call.op.callBoxed(&stack);
    call.take_results(stack);
    size_t put = 0;
    Change keep = [&](const at::Tensor &result) {
        late::launch([to = call.made[put++], result] { to.tensor().copy_(result); });
        return result;
    };
    for (size_t i = 0; i < stack.size(); i++) {
        if (!call.schema().returns()[i].alias_info())
            changed(stack[i], keep, c10::Device(at::kCPU));
    }
}

void fallback(const c10::OperatorHandle &op, c10::DispatchKeySet, Stack *stack)
{
    static const std::unordered_set<std::string> waiting{
        "aten::equal",    "aten::nonzero",    "aten::masked_select",    "aten::_unique2",
        "aten::bincount", "aten::unique_dim", "aten::repeat_interleave"};
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    size_t count = op.schema().arguments().size();
    Call call(op, Stack(stack->end() - static_cast<ptrdiff_t>(count), stack->end()));
    torch::jit::drop(*stack, count);
    if (waiting.count(op.schema().name())) {
        run_waiting(call);
    } else {
        call.take_results(call.metas());
        call.take_arguments();
    }
    for (const c10::IValue &out : call.outs)
        stack->push_back(out);
    if (waiting.count(op.schema().name()))
        return;
    call.outs.clear();
    late::launch([call = std::move(call)] {
        try {
            call.run();
        } catch (const c10::Error &error) {
            throw std::runtime_error(call.schema().name() + ": " + error.what_without_backtrace());
        }
    });
}

std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor &input, double p,
                                                  std::optional<bool> train)
{
    bool is_on = !train || *train;
    at::Tensor output = empty_as(input), mask = empty_as(input.to(at::kMeta).to(at::kBool));
    auto generator = next_generator({});
    late::launch([=, in = Ref(input), out = Ref(output), used = Ref(mask)] {
        at::Tensor kept = used.tensor();
        if (is_on)
            kept.bernoulli_(1 - p, generator);
        else
            kept.fill_(true);
        double scale = !is_on ? 1.0 : p < 1 ? 1 / (1 - p) : 0.0;
        out.tensor().copy_(in.tensor().mul(kept).mul(scale));
    });
    return {output, mask};
}

/* The CPU's kernel takes no integers, CUDA's does. */
at::Tensor histc(const at::Tensor &self, int64_t bins, const at::Scalar &min, const at::Scalar &max)
{
    at::Tensor counts = empty({bins}, self.scalar_type(), {}, {}, {}, {});
    late::launch([=, in = Ref(self), out = Ref(counts)] {
        out.tensor().copy_(in.tensor().to(at::kFloat).histc(bins, min, max));
    });
    return counts;
}

TORCH_LIBRARY_IMPL(_, CUDA, m)
{
    m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m)
{
    m.impl("empty.memory_format", empty);
    m.impl("empty_strided", empty_strided);
    m.impl("as_strided", as_strided);
    m.impl("view", [](const at::Tensor &self, c10::IntArrayRef sizes) {
        return at::native::view(self, sizes);
    });
    m.impl("_reshape_alias", at::native::_reshape_alias);
    m.impl("resize_", resize_);
    m.impl("set_.source_Storage_storage_offset", set_storage);
    m.impl("record_stream", record_stream);
    m.impl("_fused_sdp_choice", attention_choice);
    m.impl("copy_", copy_);
    m.impl("_local_scalar_dense", local_scalar);
    m.impl("native_dropout", native_dropout);
    m.impl("histc", histc);
    /* Not the composite, whose statistics the CPU's kernel for backward does not take. */
    m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

} // namespace

namespace at
{
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks);
} // namespace at

extern "C" {

void late_random_get(uint64_t *words)
{
    auto *state = default_generator().get<LateGenerator>();
    words[0] = state->from;
    words[1] = state->offset;
}

void late_random_set(const uint64_t *words)
{
    auto *state = default_generator().get<LateGenerator>();
    state->from = words[0];
    state->offset = words[1];
}
}
