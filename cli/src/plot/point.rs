//! A tensor in a plot.

use crate::text::names::Place;

/// A tensor and its SQNR in dB.
pub(crate) struct Point<'a> {
    pub(crate) name: &'a str,
    pub(crate) sqnr_db: f64,
    pub(crate) place: Place,
}

impl<'a> Point<'a> {
    /// Returns `None` if the SQNR is not finite: without any error, or with infinite errors.
    pub(crate) fn new(name: &'a str, sqnr_db: f64) -> Option<Self> {
        sqnr_db.is_finite().then(|| Self { name, sqnr_db, place: Place::of(name) })
    }
}
