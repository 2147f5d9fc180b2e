/** A bar of pieces that add up to a whole: the phases of a migration, the parts of a switchover. */
import { duration } from '../text/units';

export interface Piece {
  name: string;
  ms: number;
  colour: string;
}

export function Pieces({ label, pieces }: { label: string; pieces: Piece[] }) {
  const whole = pieces.reduce((sum, piece) => sum + piece.ms, 0);
  const spoken = pieces.map((piece) => `${piece.name} ${duration(piece.ms)}`).join(', ');
  return (
    <div class="pieces">
      <div class="pieces-bar" role="img" aria-label={`${label}: ${spoken}`}>
        {pieces.map((piece) => (
          <span
            key={piece.name}
            class={`piece ${piece.colour}`}
            style={{ flexGrow: String(Math.max(piece.ms, whole * 0.004)) }}
            title={`${piece.name} ${duration(piece.ms)}`}
          />
        ))}
      </div>
      <ul class="pieces-key">
        {pieces.map((piece) => (
          <li key={piece.name}>
            <span class={`swatch ${piece.colour}`} /> {piece.name} <b>{duration(piece.ms)}</b>
          </li>
        ))}
      </ul>
    </div>
  );
}

/** A small line without axes, for rows. */
export function Spark({ values, label }: { values: number[]; label: string }) {
  const most = Math.max(...values, 1e-9);
  const points = values.map((value, at) => {
    const x = values.length > 1 ? (at / (values.length - 1)) * 100 : 0;
    return `${x.toFixed(1)},${(22 - (value / most) * 20).toFixed(1)}`;
  });
  return (
    <svg
      class="spark"
      viewBox="0 0 100 24"
      preserveAspectRatio="none"
      role="img"
      aria-label={label}
    >
      <polyline points={points.join(' ')} vector-effect="non-scaling-stroke" />
    </svg>
  );
}
