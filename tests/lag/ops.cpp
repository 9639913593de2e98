/* The late device: operations. See late.h. */
#include "late.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <unordered_set>

namespace
{

using Stack = torch::jit::Stack;
using Change = std::function<at::Tensor(const at::Tensor &)>;

constexpr auto LATE = late::DEVICE;

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

/* An argument that is not on the device: a number, or indices, whose values are taken now. */
at::Tensor taken(const c10::FunctionSchema &schema, const at::Tensor &tensor)
{
    static const std::unordered_set<std::string> indexing{"aten::index", "aten::index_put_",
                                                          "aten::_index_put_impl_"};
    TORCH_CHECK(tensor.device().is_cpu() && (tensor.dim() == 0 || indexing.count(schema.name())),
                "Expected all tensors to be on the same device: ", schema.name(),
                " got a tensor on ", tensor.device(), " and others on the late device");
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
    Change change = [](const at::Tensor &tensor) {
        if (!is_late(tensor))
            return tensor;
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
            [this](const at::Tensor &form) {
                at::Tensor tensor = empty_as(form);
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
        arguments[i] = late::next_generator(given);
        has_generator = true;
    }
    TORCH_CHECK(!is_random || has_generator, "late: ", schema().name(), " takes no generator");
    Change change = [this](const at::Tensor &tensor) {
        are_late.push_back(is_late(tensor));
        if (is_late(tensor))
            refs.emplace_back(tensor);
        else
            hosts.push_back(taken(schema(), tensor));
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
    late::launch([call = std::move(call)] { call.run(); });
}

std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor &input, double p,
                                                  std::optional<bool> train)
{
    bool is_on = !train || *train;
    at::Tensor output = empty_as(input), mask = empty_as(input.to(at::kMeta).to(at::kBool));
    auto generator = late::next_generator({});
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
}

} // namespace
