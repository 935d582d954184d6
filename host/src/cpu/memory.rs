//! Software prefetch, and stores that bypass the caches.

pub(super) mod prefetch;
pub(super) mod streaming_stores;
