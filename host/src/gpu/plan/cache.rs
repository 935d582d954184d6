//! Plans that were made before, by shape, tokens and dtype.

use std::collections::HashMap;
use std::fmt;
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError};

use crate::error::Result;

/// Plans that are kept, at most. A serving engine with 300 shapes of layers and batches keeps them
/// all.
const MOST: usize = 4096;

/// A bounded map from products to their plans. Finding a plan allocates nothing.
pub(in crate::gpu) struct PlanCache<K, P> {
    plans: Mutex<HashMap<K, Arc<P>>>,
}

impl<K, P> Default for PlanCache<K, P> {
    fn default() -> Self {
        Self { plans: Mutex::default() }
    }
}

/// Shows that it is a cache; plans are large.
impl<K, P> fmt::Debug for PlanCache<K, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PlanCache").finish_non_exhaustive()
    }
}

impl<K: Eq + Hash, P> PlanCache<K, P> {
    /// The plan for a product: the one that is kept, or a new one. When `MOST` plans are kept, all
    /// are dropped first: shapes recur, and plans are made again in microseconds.
    ///
    /// # Errors
    /// The errors of `plan`; nothing is kept then.
    pub(in crate::gpu) fn get(&self, key: K, plan: impl FnOnce() -> Result<P>) -> Result<Arc<P>> {
        // A thread that panicked left the map whole: it is changed by single calls.
        let lock = || self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = lock().get(&key) {
            return Ok(found.clone());
        }
        // Planning may compile a kernel, which other products need not wait for.
        let made = Arc::new(plan()?);
        let mut plans = lock();
        if plans.len() >= MOST {
            plans.clear();
        }
        Ok(plans.entry(key).or_insert(made).clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    #[test]
    fn plans_are_made_once_and_errors_are_not_kept() {
        let cache = PlanCache::<u32, u32>::default();
        assert!(cache.get(1, || Err(Error::Wrong("gemm"))).is_err());
        assert_eq!(*cache.get(1, || Ok(7)).unwrap(), 7);
        assert_eq!(*cache.get(1, || unreachable!("it is kept")).unwrap(), 7);
    }

    #[test]
    fn a_full_cache_starts_again() {
        let cache = PlanCache::<usize, usize>::default();
        for key in 0..=MOST {
            cache.get(key, || Ok(key)).unwrap();
        }
        assert_eq!(cache.plans.lock().unwrap().len(), 1);
        assert_eq!(*cache.get(0, || Ok(9)).unwrap(), 9);
    }
}
