//! Replays the fuzzer's stored inputs in `fuzz/corpus/` through their targets.
//!
//! A target must return without a panic, must not allocate more than such small files justify, and
//! may write only to its output.

use std::alloc::{GlobalAlloc, Layout, System};
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use microscale_test_support::{data_dir, hostile};

/// Maximum size of a single allocation in bytes, the same as the fuzzer's.
const MOST_AT_ONCE: usize = 256 << 20;

/// Maximum time of an input. Inputs usually take milliseconds, and the margin is for busy machines.
const LONGEST: Duration = Duration::from_secs(20);

/// Counts allocations on top of the system's allocator.
struct Counting;

/// The largest allocation so far.
static LARGEST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is forwarded unchanged to `System`, which is a valid allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller upholds the contract of `alloc`, which is the same for `System`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller upholds the contract of `alloc_zeroed`, which is the same for
        // `System`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, old: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        LARGEST.fetch_max(size, Ordering::Relaxed);
        // SAFETY: the caller passes a block of this allocator, and all of them come from `System`.
        // The rest of the contract of `realloc` is the same.
        unsafe { System.realloc(old, layout, size) }
    }

    unsafe fn dealloc(&self, old: *mut u8, layout: Layout) {
        // SAFETY: the caller passes a block of this allocator, and all of them come from `System`.
        unsafe { System.dealloc(old, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Replays a target's corpus.
fn replay(target: &str) {
    let folder = data_dir().join("fuzz/corpus").join(target);
    let mut inputs: Vec<_> = fs::read_dir(&folder)
        .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
        .map(|entry| entry.unwrap().path())
        .collect();
    inputs.sort();
    assert!(!inputs.is_empty(), "{} is empty", folder.display());
    for input in inputs {
        let (bytes, start) = (fs::read(&input).unwrap(), Instant::now());
        let done = catch_unwind(AssertUnwindSafe(|| hostile::run(target, &bytes)));
        assert!(done.is_ok(), "{} panics", input.display());
        assert!(start.elapsed() < LONGEST, "{} takes {:?}", input.display(), start.elapsed());
        let largest = LARGEST.load(Ordering::Relaxed);
        assert!(
            largest <= MOST_AT_ONCE,
            "{} or another makes an allocation of {largest} bytes",
            input.display()
        );
    }
}

/// One test per target, so that they run in parallel.
macro_rules! replayed {
    ($($target:ident)*) => {
        $(#[test]
        fn $target() {
            replay(stringify!($target));
        })*

        #[test]
        fn every_target_has_a_test() {
            assert!(hostile::TARGETS.iter().map(|target| target.name).eq([$(stringify!($target)),*]));
        }
    };
}

replayed! { safetensors gguf imatrix input_scales pytorch directory packed parts ptx tensors recipe }
