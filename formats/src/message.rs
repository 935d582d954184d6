//! `Debug` of errors.

/// Implements `Debug` of errors: it prints the message and its causes, so that a `main` which
/// returns the error reports it.
#[doc(hidden)]
#[macro_export]
macro_rules! debug_is_message {
    ($($type:ty),+ $(,)?) => {$(
        impl ::core::fmt::Debug for $type {
            fn fmt(&self, f: &mut ::core::fmt::Formatter<'_>) -> ::core::fmt::Result {
                ::core::write!(f, "{self}")?;
                let mut cause = ::core::error::Error::source(self);
                while let Some(error) = cause {
                    ::core::write!(f, ": {error}")?;
                    cause = error.source();
                }
                Ok(())
            }
        }
    )+};
}
