// Linux may refuse AMX's tile registers. The library then selects the next target. A filter of system calls refuses them
// here. On a processor without AMX, the program tests the request alone.

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <ssmax/attention.hpp>
#include <ssmax/target.hpp>
#include <vector>

namespace {

/// Makes arch_prctl fail with EPERM, for this process.
bool deny_arch_prctl() {
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_arch_prctl, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{static_cast<unsigned short>(std::size(filter)), filter};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

int fail(const char* message) {
  std::printf("%s\n", message);
  return 1;
}

}  // namespace

int main() {
  if (!deny_arch_prctl()) return 77;  // skipped: the system has no such filters
  errno = 0;
  if (::syscall(SYS_arch_prctl, 0x1023, 18) == 0 || errno != EPERM) return fail("the request was not denied");
  const auto targets = ssmax::available_targets();
  if (std::ranges::count(targets, ssmax::Target::amx) != 0) return fail("amx is available, though denied");
  if (ssmax::active_target() == ssmax::Target::amx) return fail("amx is active, though denied");
  // A call of bfloat16 with 40 queries, which AMX would compute: the weights are equal, so out is v.
  const std::vector<ssmax::bfloat16> q(40 * 64, ssmax::bfloat16(1)), k(300 * 64, ssmax::bfloat16(0.5F));
  std::vector<ssmax::bfloat16> out(40 * 64);
  ssmax::attention({.q = {q.data(), {1, 1, 40, 64}},
                    .k = {k.data(), {1, 1, 300, 64}},
                    .v = {k.data(), {1, 1, 300, 64}},
                    .out = {out.data(), {1, 1, 40, 64}}},
                   ssmax::LogN{});
  if (std::ranges::any_of(out, [](ssmax::bfloat16 x) { return static_cast<float>(x) != 0.5F; }))
    return fail("wrong result");
  std::printf("%s\n", ssmax::target_name(ssmax::active_target()));
}
