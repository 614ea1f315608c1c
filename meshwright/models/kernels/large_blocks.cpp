// Memory of large tensors on CPUs, from heaps of their own: one per range of sizes.
//
// In malloc's heap a smaller block comes to lie where a larger one was freed. The next large one
// then finds no hole, and the heap grows. Blocks of about one size fit into each other's holes.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <pthread.h>
#include <sys/mman.h>

#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>

namespace {

constexpr size_t ALIGNMENT = 64;  // bytes, as torch's own blocks

// A range of addresses. Pages that were touched stay with the process.
class Heap {
 public:
  void begin_at(char* begin, size_t bytes) {
    begin_ = begin;
    end_ = begin + bytes;
    add_hole(begin, bytes);
  }

  bool has(const void* block) const { return begin_ <= block && block < end_; }

  // The start of the smallest hole that is large enough, at the lowest address; null: there is none.
  void* allocate(size_t bytes) {
    if (bytes > static_cast<size_t>(end_ - begin_)) return nullptr;
    bytes = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    std::lock_guard<std::mutex> guard(mutex_);
    auto hole = holes_by_size_.lower_bound({bytes, nullptr});
    if (hole == holes_by_size_.end()) return nullptr;
    auto [size, block] = *hole;
    remove_hole(block, size);
    if (size > bytes) add_hole(block + bytes, size - bytes);
    blocks_[block] = bytes;
    return block;
  }

  // Make a hole of a block and its neighbours that are holes.
  void free(void* block) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto found = blocks_.find(static_cast<char*>(block));
    char* start = found->first;
    size_t size = found->second;
    blocks_.erase(found);
    auto after = holes_.lower_bound(start);
    if (after != holes_.begin()) {
      auto [before, its_size] = *std::prev(after);
      if (before + its_size == start) {
        remove_hole(before, its_size);
        start = before;
        size += its_size;
      }
    }
    if (after != holes_.end() && after->first == start + size) {
      size_t its_size = after->second;
      remove_hole(start + size, its_size);
      size += its_size;
    }
    add_hole(start, size);
  }

  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  void add_hole(char* start, size_t bytes) {
    holes_[start] = bytes;
    holes_by_size_.insert({bytes, start});
  }

  void remove_hole(char* start, size_t bytes) {
    holes_.erase(start);
    holes_by_size_.erase({bytes, start});
  }

  char *begin_ = nullptr, *end_ = nullptr;
  std::mutex mutex_;
  std::map<char*, size_t> holes_;
  std::set<std::pair<size_t, char*>> holes_by_size_;
  std::unordered_map<char*, size_t> blocks_;
};

// Never destroyed: tensors may be freed after statics.
Heap& medium = *new Heap;
Heap& large = *new Heap;
c10::Allocator* others = nullptr;  // of smaller blocks

constexpr size_t MEDIUM = size_t{1} << 20, LARGE = size_t{16} << 20;  // the smallest, in bytes

// A forked process has copies of the mutexes: no other thread may hold one.
void lock_heaps() {
  large.lock();
  medium.lock();
}

void unlock_heaps() {
  medium.unlock();
  large.unlock();
}

void free_block(void* block) {
  for (Heap* heap : {&large, &medium}) {
    if (heap->has(block)) {
      c10::profiledCPUMemoryReporter().Delete(block);
      heap->free(block);
      return;
    }
  }
  others->raw_deallocate(block);
}

class LargeBlocks final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* block = bytes < MEDIUM ? nullptr : (bytes < LARGE ? medium : large).allocate(bytes);
    if (!block) return others->allocate(bytes);
    c10::profiledCPUMemoryReporter().New(block, bytes);
    return {block, block, &free_block, c10::Device(c10::DeviceType::CPU)};
  }

  // For all blocks; in a DataPtr those of `others` have the deleter of that.
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

}  // namespace

// Have torch take memory on CPUs from these heaps, each of so many bytes of addresses. Returns
// whether it does. Called once.
extern "C" bool take_large_blocks(size_t bytes) {
  void* begin = mmap(
      nullptr, 2 * bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1,
      0);
  if (begin == MAP_FAILED) return false;
  madvise(begin, 2 * bytes, MADV_HUGEPAGE);  // fewer page faults; some systems have no such pages
  medium.begin_at(static_cast<char*>(begin), bytes);
  large.begin_at(static_cast<char*>(begin) + bytes, bytes);
  pthread_atfork(lock_heaps, unlock_heaps, unlock_heaps);
  others = c10::GetCPUAllocator();
  auto* ours = new LargeBlocks;
  c10::SetCPUAllocator(ours, 1);  // 0 is the priority of torch's own
  return c10::GetCPUAllocator() == ours;
}
