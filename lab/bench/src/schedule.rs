//! Order in which the engines take turns. Pure.

/// Spreads each engine's runs evenly over the whole time, so that changes on the machine affect all
/// of them alike. Returns the engines' indices in `runs`, in order.
pub(crate) fn turns(runs: &[u32]) -> Vec<usize> {
    let mut turns: Vec<(f64, usize)> = Vec::new();
    for (engine, count) in runs.iter().enumerate() {
        turns.extend((0..*count).map(|run| ((f64::from(run) + 0.5) / f64::from(*count), engine)));
    }
    turns.sort_by(|(one, _), (other, _)| one.total_cmp(other));
    turns.into_iter().map(|(_, engine)| engine).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_counts_alternate() {
        assert_eq!(turns(&[2, 2, 2]), [0, 1, 2, 0, 1, 2]);
    }

    #[test]
    fn all_runs_take_place_and_the_many_surround_the_few() {
        let order = turns(&[20, 5, 5]);
        assert_eq!(order.len(), 30);
        assert_eq!(order.iter().filter(|engine| **engine == 0).count(), 20);
        let longest = order.chunk_by(|a, b| a == b).map(<[usize]>::len).max();
        assert!(longest <= Some(4), "{order:?}");
        assert_eq!(turns(&[0, 3]), [1, 1, 1]);
    }
}
