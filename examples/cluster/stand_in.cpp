// Replaces ssmax::compiled and some system calls when SimGrid's SMPI runs an unchanged MPI program. The
// replacement computes no results. It advances the simulated clock by the FLOP of the real computation.
//
// A host's speed is the speed of the forward. Its property `backward` is the speed of the backward, as a
// factor of the forward's.
#include <mpi.h>
#include <smpi/smpi.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <simgrid/s4u/Actor.hpp>
#include <simgrid/s4u/Host.hpp>
#include <ssmax/mpi.hpp>
#include <unordered_map>
#include <vector>

namespace {

using ssmax::index_t;

/// Returns the number of visible keys, summed over the queries of one head. Counts every 64th query and
/// interpolates linearly between. Requires masks that change at one or two places of the sequence, and that
/// all heads have the same mask.
double visible(const ssmax::shared::Problem<float>& problem, const ssmax::shared::Variant<float>& variant) {
  const index_t count = problem.q.extent(2), step = std::max<index_t>(1, (count - 1) / 64);
  double sum = 0;
  for (index_t batch = 0; batch < problem.q.extent(0); ++batch) {
    const auto seen = [&](index_t i) {
      const ssmax::Query query{batch, 0, problem.first_query + i,
                               ssmax::detail::sequence_of(problem, batch).shape};
      const index_t keys = variant.row(query, problem.keys.stored(batch)).keys.size();
      return static_cast<double>(std::max<index_t>(0, keys));
    };
    for (index_t i = 0; i < count; i += step) {
      const index_t last = std::min(i + step, count) - 1;
      sum += (seen(i) + seen(last)) / 2 * static_cast<double>(last - i + 1);
    }
  }
  return sum;
}

/// Advances the clock. A rank with its own core sleeps instead of computing. Reason: at the end of a
/// computation SimGrid 3.32 searches all messages of the rank, which takes long on a thousand machines.
void compute(double flop) {
  if (flop <= 0) return;
  const simgrid::s4u::Host* host = simgrid::s4u::this_actor::get_host();
  if (host->get_actor_count() > static_cast<std::size_t>(host->get_core_count())) {
    smpi_execute_flops(flop);
  } else {
    simgrid::s4u::this_actor::sleep_for(flop / host->get_speed());
  }
}

}  // namespace

namespace ssmax {
inline namespace SSMAX_COMPILED_NAMESPACE {
namespace compiled {

template <>
void run_attention<float>(const shared::Problem<float>& problem, const shared::Variant<float>& variant,
                          const shared::Result<float>&, Workspace*, const shared::AnyExecutor&) {
  const auto products = static_cast<double>(2 * (problem.width() + problem.value_width()));
  compute(products * static_cast<double>(problem.q.extent(1)) * visible(problem, variant));
}

template <>
void run_backward<float>(const shared::BackwardProblem<float>& problem,
                         const shared::GradientVariant<float>& variant, Workspace*,
                         const shared::AnyExecutor&) {
  const shared::Problem<float>& forward = problem.forward;
  const auto products = static_cast<double>(2 * (3 * forward.width() + 2 * forward.value_width()));
  const char* speed = simgrid::s4u::this_actor::get_host()->get_property("backward");
  compute(products * static_cast<double>(forward.q.extent(1)) * visible(forward, variant) /
          (speed == nullptr ? 1 : std::atof(speed)));
}

}  // namespace compiled
}  // namespace SSMAX_COMPILED_NAMESPACE
}  // namespace ssmax

// Waiting. A rank that yields the processor continues when one of the messages has arrived that it tested.
// The program's requests are Messages, because SMPI replaces its own requests.

namespace {

struct Message {
  MPI_Request request = MPI_REQUEST_NULL;
};

/// Returns the unfinished messages that the running rank has tested.
std::vector<Message*>& awaited() {
  static std::unordered_map<long, std::vector<Message*>> of_ranks;
  return of_ranks[simgrid::s4u::this_actor::get_pid()];
}

MPI_Request name_of(Message* message) { return reinterpret_cast<MPI_Request>(message); }

}  // namespace

extern "C" int sched_yield() noexcept {
  std::vector<MPI_Request> requests;
  for (const Message* message : awaited()) requests.push_back(message->request);
  int first = 0;
  if (requests.empty()) std::abort();
  PMPI_Waitany(static_cast<int>(requests.size()), requests.data(), &first, MPI_STATUS_IGNORE);
  const auto arrived = awaited().begin() + first;
  (*arrived)->request = MPI_REQUEST_NULL;
  awaited().erase(arrived);
  return 0;
}

extern "C" int MPI_Isend(const void* data, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm,
                         MPI_Request* request) {
  auto* message = new Message;
  *request = name_of(message);
  return PMPI_Isend(data, count, type, to, tag, comm, &message->request);
}

extern "C" int MPI_Irecv(void* data, int count, MPI_Datatype type, int from, int tag, MPI_Comm comm,
                         MPI_Request* request) {
  auto* message = new Message;
  *request = name_of(message);
  return PMPI_Irecv(data, count, type, from, tag, comm, &message->request);
}

extern "C" int MPI_Test(MPI_Request* request, int* done, MPI_Status*) {
  *done = 1;
  if (*request == MPI_REQUEST_NULL) return MPI_SUCCESS;
  auto* message = reinterpret_cast<Message*>(*request);
  if (message->request != MPI_REQUEST_NULL) {
    const int code = PMPI_Test(&message->request, done, MPI_STATUS_IGNORE);
    if (code != MPI_SUCCESS) return code;
  }
  const auto known = std::find(awaited().begin(), awaited().end(), message);
  if (*done == 0) {
    if (known == awaited().end()) awaited().push_back(message);
    return MPI_SUCCESS;
  }
  if (known != awaited().end()) awaited().erase(known);
  delete message;
  *request = MPI_REQUEST_NULL;
  return MPI_SUCCESS;
}

/// Tests the messages up to the first unfinished one: a rank has about a thousand messages per call.
extern "C" int MPI_Testsome(int count, MPI_Request* requests, int* finished, int* indices, MPI_Status*) {
  for (*finished = 0; *finished < count; ++*finished) {
    int done = 0;
    const int code = MPI_Test(&requests[*finished], &done, MPI_STATUS_IGNORE);
    if (code != MPI_SUCCESS) return code;
    if (done == 0) return MPI_SUCCESS;
    indices[*finished] = *finished;
  }
  return MPI_SUCCESS;
}

// Memory. The large arrays of all ranks share the same memory, and messages between such arrays are not
// copied.

namespace {

constexpr std::size_t large = std::size_t{1} << 20, place_size = std::size_t{1} << 32;

/// Returns the begin of the addresses for large arrays. SMPI maps all addresses to the same few pages.
std::byte* place() {
  static auto* begin = static_cast<std::byte*>(smpi_shared_malloc(place_size, __FILE__, __LINE__));
  return begin;
}

void* allocate_large(std::size_t size, std::size_t alignment) {
  static std::unordered_map<long, std::uintptr_t> ends;
  std::uintptr_t& end = ends[simgrid::s4u::this_actor::get_pid()];
  const auto begin = reinterpret_cast<std::uintptr_t>(place());
  const std::uintptr_t at = (std::max(end, begin) + alignment - 1) / alignment * alignment;
  if (size > begin + place_size - at) throw std::bad_alloc();
  end = at + size;
  return reinterpret_cast<void*>(at);
}

void* allocate(std::size_t size, std::size_t alignment) {
  if (size >= large) return allocate_large(size, alignment);
  void* memory = std::aligned_alloc(alignment, (size + alignment) / alignment * alignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

/// Frees small arrays only: there are few large arrays.
void release(void* memory) {
  auto* at = static_cast<std::byte*>(memory);
  if (at < place() || at >= place() + place_size) std::free(memory);
}

}  // namespace

void* operator new(std::size_t size) { return allocate(size, alignof(std::max_align_t)); }
void* operator new(std::size_t size, std::align_val_t alignment) {
  return allocate(size, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory) noexcept { release(memory); }
void operator delete(void* memory, std::size_t) noexcept { release(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { release(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { release(memory); }
