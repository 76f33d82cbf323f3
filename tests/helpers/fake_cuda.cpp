// A CUDA device that does nothing, for a torch that was built without CUDA.
//
// Fake tensors compute nothing, yet indexing and autograd still ask for the device's guard and for
// its hooks, and a CPU build has neither. `swap_cuda()` puts them in place; called again, it takes
// them away.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <utility>

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;
using c10::impl::DeviceGuardImplInterface;

namespace {

const Device gpu(DeviceType::CUDA, 0);
const Stream stream(Stream::DEFAULT, gpu);

struct Guard final : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device exchangeDevice(Device) const override { return gpu; }
  Device getDevice() const override { return gpu; }
  Stream getStream(Device) const noexcept override { return stream; }
  Stream exchangeStream(Stream) const noexcept override { return stream; }
};

struct Hooks final : at::CUDAHooksInterface {
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
};

const Guard our_guard;
const Hooks our_hooks;
const DeviceGuardImplInterface* other_guard = &our_guard;

// Torch keeps its hooks object for good once it was asked for: what can be exchanged is the table
// of the object's functions.
void* other_table = *reinterpret_cast<void* const*>(&our_hooks);

}  // namespace

extern "C" void swap_cuda() {
  auto& guard = c10::impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)];
  other_guard = guard.exchange(other_guard);
  auto* hooks = const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks());
  std::swap(*reinterpret_cast<void**>(hooks), other_table);
}
